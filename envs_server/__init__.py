"""Text environments behind a gRPC service: `python -m envs_server --help`."""

import pkgutil

# So that an environment may live outside of this repository: in a folder
# `envs_server` (without an `__init__.py`) of a directory on PYTHONPATH.
__path__ = pkgutil.extend_path(__path__, __name__)
