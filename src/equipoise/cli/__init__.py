"""The command line. A file or a room per verb: parse, call, print.

A verb module has ``HELP`` (a line), ``EXAMPLES`` (shown under its help), ``add_arguments(parser)``
and ``run(args) -> int``. It imports what is slow inside ``run``, so that help is instant.
"""
