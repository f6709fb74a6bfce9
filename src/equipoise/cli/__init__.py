"""Floor 9: the command line. One file per verb: parse, call, print.

A verb module has ``HELP`` (a line), ``EXAMPLES`` (shown under its help), ``add_arguments(parser)``
and ``run(args) -> int``. It imports what is slow inside ``run``, so that help is instant.
"""
