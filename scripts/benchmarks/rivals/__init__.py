"""What Immortal is compared with, apart from grpcio, which `immortal bench` knows as well."""
