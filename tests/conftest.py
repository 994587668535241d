"""What every test may count on: Ctrl-C reaches Python, also where the shell started the tests in the background with it ignored, and
never two processes start a Ray cluster at once."""

import signal

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """With ``--dist loadgroup`` a file stays in one process, which shares its fixtures; all that start Ray clusters are one group."""
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ray" if item.get_closest_marker("ray") else item.path.stem))


@pytest.fixture(scope="session")
def cluster():
    """A Ray cluster of one node with four CPUs, which this process has joined."""
    import ray_clusters

    with ray_clusters.cluster() as made:
        yield made
