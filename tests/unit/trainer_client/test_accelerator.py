"""`get_accelerator()` shows the device of the training under DeepSpeed's names; on CPUs this process and its memory."""

from __future__ import annotations

import gc

import pytest
import torch

from trainer_client.accelerator import DeviceAccelerator, get_accelerator, set_accelerator
from trainer_client.errors import ConfigError


def test_the_device_is_the_one_that_initialize_takes() -> None:
    name = "cuda" if torch.cuda.is_available() else "cpu"

    assert get_accelerator().device_name() == name
    assert get_accelerator() is get_accelerator()
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        set_accelerator("xpu")


def test_a_cpu_is_one_device_without_streams_of_its_own() -> None:
    cpu = DeviceAccelerator("cpu")

    assert (cpu.device_name(3), cpu.current_device_name(), cpu.current_device(), cpu.device_count()) == (
        "cpu",
        "cpu",
        0,
        1,
    )
    assert cpu.communication_backend_name() == "gloo"
    assert cpu.is_available()
    assert cpu.is_synchronized_device()
    cpu.set_device(0)
    cpu.synchronize()
    cpu.empty_cache()
    with cpu.stream(cpu.current_stream()):
        tensor = cpu.HalfTensor([1, 2])
    assert (tensor.dtype, tensor.device.type) == (torch.half, "cpu")
    assert cpu.on_accelerator(tensor)
    assert torch.bfloat16 in cpu.supported_dtypes()


def test_a_gpu_is_named_by_its_index() -> None:
    assert DeviceAccelerator("cuda").device_name(1) == "cuda:1"
    assert DeviceAccelerator("cuda").device_name() == "cuda"
    assert DeviceAccelerator("cuda").communication_backend_name() == "nccl"


def test_random_numbers_come_from_the_devices_generator() -> None:
    cpu = DeviceAccelerator("cpu")
    before = cpu.get_rng_state()
    try:
        cpu.manual_seed(11)
        first = torch.rand(3)
        cpu.manual_seed_all(11)
        assert torch.equal(torch.rand(3), first)
        assert cpu.initial_seed() == 11
        assert cpu.default_generator(0) is torch.default_generator
    finally:
        cpu.set_rng_state(before)


def test_the_memory_of_a_cpu_is_that_of_the_process_and_the_machine() -> None:
    cpu = DeviceAccelerator("cpu")
    # Memory that other tests of this process have left must not become free between the two readings.
    gc.collect()
    before = cpu.memory_allocated()
    held = torch.ones(64 << 20)

    assert cpu.memory_allocated() - before > held.nbytes // 2
    assert cpu.max_memory_allocated() >= held.nbytes
    assert 0 < cpu.available_memory() < cpu.total_memory()


def test_a_cpu_answers_as_that_of_deepspeed() -> None:
    cpu, called, environment = DeviceAccelerator("cpu"), list[int](), {"PATH": "/bin"}
    cpu.lazy_call(lambda: called.append(1))
    cpu.set_visible_devices_envs(environment, [0, 1])

    assert called == [1] and environment == {"PATH": "/bin"}
    assert cpu.Event is None and cpu.export_envs() == [] and not cpu.is_triton_supported()
    assert cpu.get_compile_backend() == "inductor" and min(cpu.get_rss(), cpu.reset_rss()) > 1 << 20


def test_what_is_left_out_says_what_to_use() -> None:
    with pytest.raises(AttributeError, match=r"no 'create_graph' here: use torch\.cuda\.CUDAGraph"):
        DeviceAccelerator("cpu").create_graph()
    with pytest.raises(AttributeError, match=r"no 'build_extension' here: this library compiles nothing"):
        DeviceAccelerator("cpu").build_extension()
    with pytest.raises(AttributeError, match=r"no 'communication_backend_version' on cpu: gloo has no version"):
        DeviceAccelerator("cpu").communication_backend_version()
    assert not hasattr(DeviceAccelerator("cpu"), "temperature")
