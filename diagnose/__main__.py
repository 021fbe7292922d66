"""Makes `python -m diagnose` the same as `diagnose`."""

from diagnose.cli.main import main

main()
