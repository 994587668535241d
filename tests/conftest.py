"""What every test may count on: Ctrl-C reaches Python, also where the shell started the tests in the background with it ignored; a file's
tests share one process and its fixtures; and no other test process starts Ray clusters meanwhile."""

import fcntl
import signal

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
STARTS_CLUSTERS = {"test_doctor_cluster.py", "test_drafters.py", "test_ray.py"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Hand out whole files, and all that start Ray clusters to one process, in the order of their names: the clusters come early.

    ``--dist loadgroup`` would say the same, but with pytest 9.2 xdist 3.8 marks the groups where nobody looks and hands out single tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.split("::")[0].rsplit("/")[-1]
            return "clusters" if file in STARTS_CLUSTERS else file

    config.option.loadscopereorder = False
    return ByFile(config, log)


@pytest.fixture(scope="session")
def only_clusters(tmp_path_factory):
    """Whoever looks at all of Ray's processes on the machine is alone with them, or fails."""
    with (tmp_path_factory.getbasetemp().parent / "clusters").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


@pytest.fixture(scope="session")
def cluster(only_clusters):
    """A Ray cluster of one node with four CPUs, which this process has joined."""
    import ray_clusters

    with ray_clusters.cluster() as made:
        yield made
