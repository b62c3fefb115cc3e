"""What logs show to other programs: traces for viewers, tables for SQL. All of it only reads logs."""
