"""The app's sockets: who may connect, who proves to be the app, and what goes over them."""
