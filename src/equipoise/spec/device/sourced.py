"""What the shipped devices have in common: bytes that are taken, and the sources of numbers."""

from equipoise.base.units import MIB

_CONTEXT_BYTES = 600 * MIB
"""A CUDA context with cuBLAS and kernels loaded, as nvidia-smi shows for an idle rank."""

_NCCL_BYTES = 392 * MIB
"""NCCL's buffers in a group of 8 (aiconfigurator-core 0.12.0, systems/h100_sxm.yaml)."""

RESERVED_BYTES = _CONTEXT_BYTES + _NCCL_BYTES
"""Memory of a device that no tensor gets."""

_REPORTED = "memory.total of nvidia-smi"
_IDLE = "nvidia-smi at rest, about"
_RESERVED = "aiconfigurator-core 0.12.0, nccl_mem; nvidia-smi of an idle rank"


def device_sources(
    *,
    sheet: str,
    host: str,
    price: str,
    memory: str = _REPORTED,
    reserved: str = _RESERVED,
    idle: str = _IDLE,
) -> tuple[tuple[str, str], ...]:
    """Where each number of a device is from, by its field.

    Args:
        sheet: Of its peaks, bandwidths and power.
        host: Of its host's memory and power.
        price: Of its price.
        memory: Of its memory.
        reserved: Of the part of it that no tensor gets.
        idle: Of its power at rest.
    """
    return (
        ("peaks", sheet),
        ("memory_bytes", memory),
        ("reserved_bytes", reserved),
        ("memory_bytes_per_s", sheet),
        ("host_memory_bytes", host),
        ("host_bytes_per_s", sheet),
        ("host_memory_bytes_per_s", host),
        ("power_w", sheet),
        ("idle_power_w", idle),
        ("host_power_w", host),
        ("usd_per_hour", price),
    )
