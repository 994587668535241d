"""What every test may count on: Ctrl-C reaches Python, also where the shell started the tests in the background with it ignored."""

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
