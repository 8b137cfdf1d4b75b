"""What holds for all tests."""

import signal


def pytest_configure() -> None:
    """Hear Ctrl-C, and let processes that are started hear it: a shell lets what runs in its background ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
