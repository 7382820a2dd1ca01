"""Entry point of `python -m envs_server`."""

import os

# gRPC writes a line for every handshake that fails and every peer that talks
# nonsense: any client could fill the log. GRPC_VERBOSITY=INFO shows them.
os.environ.setdefault('GRPC_VERBOSITY', 'NONE')

from envs_server import serve  # noqa: E402

if __name__ == '__main__':
  serve.main()
