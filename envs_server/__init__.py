"""Text environments behind a gRPC service: `python -m envs_server --help`."""
