"""Entry point of `python -m envs_server`."""

from envs_server import serve

# A worker is spawned with this module in its hands and must not serve.
if __name__ == '__main__':
  serve.main()
