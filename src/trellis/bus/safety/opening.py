"""The kernel that the settings mean: another process, a file, or the policy of an embedded instance."""

from collections.abc import Callable
from pathlib import Path

from trellis.bus.safety.kernel import FileKernel, PolicyKernel, SafetyKernel
from trellis.bus.safety.policy import ALLOW_ALL_POLICY
from trellis.bus.safety.remote import RemoteKernel, is_kernel_address, kernel_address


def open_kernel(policy: str | None, *, monotonic: Callable[[], float], ca_file: Path | None = None) -> SafetyKernel:
    """`grpc://…` or `grpcs://…` is another process, any other text a file, None lets every job of `job.>` go (D53).

    A kernel that cannot be asked, or a file that does not fit, is no error here: jobs wait for it. Raises OptionInvalid.
    """
    if policy is None:
        return PolicyKernel(ALLOW_ALL_POLICY)
    if is_kernel_address(policy):
        return RemoteKernel(kernel_address(policy), monotonic=monotonic, ca_file=ca_file)
    return FileKernel(Path(policy), monotonic=monotonic)
