"""Entry point of `python -m envs_server`."""

from envs_server import serve

if __name__ == '__main__':
  serve.main()
