"""Kinds of tests, by their folder or module."""

from __future__ import annotations

from collections.abc import Collection

KINDS = {  # by the beginning of a test's id
    "tests/crash/": "kills",
    "tests/faults/": "kills",
    "tests/scenarios/": "kills",
    "tests/scenarios/test_pipeline_": "cluster",
    "tests/contract/test_pipeline_places.py::test_in_a_real_spark": "cluster",
    "tests/contract/test_pipeline_places.py::test_a_verification_of_an_encrypted_archive_by_the_command": "cluster",
    "tests/contract/c_client/": "kills",
    "tests/contract/test_app_auth.py": "kills",
    "tests/contract/test_app_ports.py": "kills",
    "tests/contract/test_app_unix_socket.py": "kills",
    "tests/contract/test_coordinator_process.py": "kills",
    "tests/contract/test_cut_links.py": "network",
    "tests/contract/test_discovery.py": "kills",
    "tests/contract/test_fork_server.py": "kills",
    "tests/contract/test_large_checkpoints.py": "kills",
    "tests/contract/test_network_faults.py": "network",
    "tests/contract/test_peer_security.py": "kills",
    "tests/security/test_app_port.py": "kills",
    "tests/security/test_control_port.py": "kills",
    "tests/security/test_files.py": "kills",
    "tests/security/test_web_guard.py": "kills",
    "tests/contract/test_log_pages.py": "slow",
    "tests/contract/test_messenger_guide.py": "slow",
    "tests/contract/test_postgres_": "slow",
    "tests/contract/test_registries.py": "slow",
    "tests/properties/test_failing_services.py": "slow",
    "tests/properties/test_nodes_runs.py": "slow",
    "tests/properties/test_ordering.py": "slow",
    "tests/properties/test_ordering_runs.py": "slow",
    "tests/properties/test_pipeline_decode.py": "slow",
    "tests/properties/test_sdk_async.py": "slow",
    "tests/properties/test_sdk_handlers.py": "slow",
    "tests/properties/test_what_if_numbers.py": "slow",
    "tests/typing/": "slow",
    "tests/unit/test_integrations_pydantic_ai.py": "slow",
    "tests/unit/test_testing_guide.py": "slow",
    "tests/unit/test_wheel.py": "slow",
}
_LONG = (  # more than 50 ms of a processor for each test
    "tests/contract/test_archive.py",
    "tests/contract/test_log_backup.py",
    "tests/contract/test_log_readers_full.py",
    "tests/contract/test_messenger",
    "tests/contract/test_pipeline_places.py",
    "tests/contract/test_replay_host.py",
    "tests/contract/test_sdk_",
    "tests/fuzz/",
    "tests/properties/",
    "tests/security/test_audit.py",
    "tests/security/test_log_key_cli.py",
    "tests/security/test_peer_port.py",
    "tests/security/test_pickle.py",
    "tests/security/test_unfinished_messages.py",
    "tests/security/test_warnings.py",
    "tests/simulation/",
    "tests/unit/test_chart.py",
    "tests/unit/test_clone_publishing.py",
    "tests/unit/test_compiled.py",
    "tests/unit/test_distribution.py",
    "tests/unit/test_harmony_instances.py",
    "tests/unit/test_messenger_loss.py",
    "tests/unit/test_nodes_exploration.py",
    "tests/unit/test_one_root.py",
    "tests/unit/test_ordering_exploration.py",
    "tests/unit/test_ordering_guide.py",
    "tests/unit/test_pipeline_packing.py",
    "tests/unit/test_pipeline_report.py",
    "tests/unit/test_sample.py",
    "tests/unit/test_sdk_asyncio.py",
    "tests/unit/test_sdk_functions.py",
    "tests/unit/test_sdk_groups",
    "tests/unit/test_sdk_limits.py",
    "tests/unit/test_sdk_multicasts.py",
    "tests/unit/test_sdk_nodes.py",
    "tests/unit/test_sdk_run_contexts.py",
    "tests/unit/test_sdk_steps.py",
    "tests/unit/test_start_of_a_coordinator.py",
    "tests/unit/test_testing_effects.py",
    "tests/unit/test_testing_environment.py",
    "tests/unit/test_testing_pytest.py",
    "tests/unit/test_timings.py",
    "tests/unit/test_types.py",
    "tests/unit/test_web_connections.py",
    "tests/unit/test_what_if_fleet.py",
    "tests/unit/test_why_minimal.py",
    "tests/unit/test_written_whole.py",
)
KINDS |= {beginning: KINDS.get(beginning, "long") for beginning in _LONG}
NOT_MEDIUM = ("slow", "kills", "cluster", "network")
NOT_QUICK = (*NOT_MEDIUM, "long")
ON_DISK = ("kills", "cluster", "network")  # all others have their files in memory: helpers/memory.py
# A writer in memory is so quick that a backup beside it never ends.
DISK_MODULES = ("tests/contract/test_log_backup.py",)
# In a parallel run, long tests begin first; the many small ones of the other folders fill the remaining time.
_FIRST = ("tests/scenarios/test_pipeline_", "tests/crash/", "tests/faults/", "tests/scenarios/", "tests/contract/")
_SHARES_NOTHING = ("tests/crash/test_soak.py", "tests/simulation/")


def kinds_of(test_id: str) -> set[str]:
    return {kind for beginning, kind in KINDS.items() if test_id.startswith(beginning)}


def is_left_out(path: str, kinds: Collection[str]) -> bool:
    """Return True if all tests of this module are of ``kinds``, so that it need not be imported."""
    return bool(kinds_of(path) & set(kinds))


def place_of(test_id: str) -> int:
    """Return a test's place in the order: lower ones begin earlier."""
    return next((place for place, folder in enumerate(_FIRST) if test_id.startswith(folder)), len(_FIRST))


def group_of(test_id: str) -> str:
    """Return the group of a test: tests of one group run in one process, one after the other."""
    if "cluster" in kinds_of(test_id):
        return "cluster"  # one Spark at a time: each takes seconds to start, and much memory
    if test_id.startswith("tests/faults/"):
        return "faults"  # each process that runs some has a server of forks for each library before libc
    if test_id.startswith(_SHARES_NOTHING):
        return test_id
    return test_id.partition("::")[0]  # a module's fixtures are set up once
