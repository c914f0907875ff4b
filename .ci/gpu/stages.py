"""What is run on a GPU, in the order of what is worth knowing first.

`run` starts this file. A stage is a list of jobs, and a job is a process, so a failure ends only
its own job. There are three result files in $OUT, or in gpu-out in the project's folder. The first
grows with every job and the others after every stage, so they exist even if the run is stopped:

    summary.txt     what is printed, with all failures at its end
    figures.json    all figures, the outcomes of the tests, and the machine that they come from
    logs.tar.gz     all logs
"""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass

from jobs import Job, Runner

CHECKS = "python .ci/gpu/checks.py"
SUITE = "python .ci/gpu/suite.py"
RANDOM_ENGINES = "tests/features/test_random_engines.py"
ONE_REQUEST = "python bench.py --num-seqs 1 --input-len 512 512 --output-len 512 512"
EXPERTS = "python bench.py --model qwen3-moe --num-seqs 32 --input-len 64 64 --output-len 256 256"
ARRIVALS = (
    "python bench.py --num-seqs 200 --request-rate 20 40 --input-len 256 1024 --output-len 64 256"
)
DEFAULT_SECONDS = 1800
COLLECTING_SECONDS = 12  # at the end, to write the results


@dataclass(frozen=True)
class Stage:
    name: str
    jobs: list[Job]
    side_by_side: bool = False  # for jobs that are not timed

    @property
    def least_seconds(self) -> int:
        """With less time left, the stage is left for the next call."""
        limits = [job.seconds for job in self.jobs]
        return (max(limits) if self.side_by_side else sum(limits)) // 3


def start_engine(name: str, options: str = "") -> Job:
    """Serve a few requests with random weights. The log shows what is slow or wrong."""
    # Processes that run side by side share the GPU's memory.
    sizes = "--num-seqs 8 --input-len 300 300 --output-len 32 32"
    memory = "--set kvcache_memory_bytes=2000000000"
    command = f"python bench.py {sizes} {memory} {options}"
    return Job(name, 110, command, shown="which (is|are) slow")


def test(name: str, files: str, selection: str = "") -> Job:
    paths = " ".join([f"tests/kernels/test_{file}.py" for file in files.split()])
    return Job(name, 200, f"{SUITE} {name} SECONDS {paths} {selection}")


def test_attention(name: str, lengths: str) -> Job:
    keywords = f"matches_the_torch_backend and triton and {lengths}"
    return test(f"attention-{name}", "attention", f"-k '{keywords}'")


def sanitize(tool: str, head_dim: int) -> Job:
    command = f"compute-sanitizer --tool {tool} {CHECKS} attend bfloat16 {head_dim} 2 small"
    return Job(f"{tool}-{head_dim}", 110, command, shown="=====.*(Invalid|hazard|SUMMARY)")


STAGES = [
    # Is the machine what it should be? An H100 copies 3.0 TB/s, an H200 4.3 TB/s, and both multiply
    # at some 790 TFLOP/s.
    Stage(
        "env",
        [
            Job("nvidia-smi", 20, "nvidia-smi", shown="Driver"),
            Job("machine", 60, f"{CHECKS} machine"),
        ],
    ),
    # Does each part work at all? The engine tests its kernels and graphs against plain torch when
    # it starts, and reports what differs.
    Stage(
        "smoke",
        [
            start_engine("bfloat16"),
            start_engine("float16", "--dtype float16"),
            start_engine("float32", "--dtype float32"),
            start_engine("int4", "--quantization int4"),
            start_engine("qwen3.5", "--model qwen3.5-0.8b"),
            start_engine("experts", "--model qwen3-moe"),
            start_engine("windows", "--model gemma-3-270m"),
            Job("attend-128", 110, f"{CHECKS} attend bfloat16 128 2"),
            Job("attend-64", 110, f"{CHECKS} attend bfloat16 64 4"),
            Job("attend-80", 110, f"{CHECKS} attend float16 80 1"),
            Job("attend-float32", 110, f"{CHECKS} attend float32 128 2"),
            Job("tokens", 110, f"{CHECKS} tokens"),
            Job("nccl", 110, f"{CHECKS} nccl"),
        ],
        side_by_side=True,
    ),
    # nano-vLLM's workload, the figure for the README.
    Stage("bench", [Job("bench", 150, "python bench.py --repeat 2 --json")]),
    # Milliseconds of decodes, mixed steps and prefills, and where they go.
    Stage("steps", [Job("steps", 120, "python .ci/gpu/steps.py")]),
    # Experts with CUDA graphs, and without.
    Stage(
        "experts",
        [Job("graphs", 60, EXPERTS), Job("eager", 60, f"{EXPERTS} --set enforce_eager=True")],
    ),
    # Where the seconds of a start go, and the memory of CUDA graphs.
    Stage("start", [Job("start", 90, "python .ci/gpu/start.py")]),
    # Products of few rows and the sampler, old and new side by side.
    Stage("products", [Job("products", 200, "python .ci/gpu/products.py")]),
    Stage("sampler", [Job("sampler", 90, "python .ci/gpu/products.py sampler")]),
    # The engine against transformers, and each kernel against plain layers.
    Stage(
        "gpu",
        [
            test("gpu-matches", "gpu", "-k matches"),
            test("gpu-logits", "gpu", "-k logits"),
            test(
                "gpu-others",
                "gpu host_synchronizations",
                "-m gpu -k 'not matches and not logits and not memory'",
            ),
            test("graphs", "cuda_graphs"),
            test(
                "layers",
                "layers fused_layers triton_attention triton_gated_delta",
                "-k 'not cpp and not one_call and not other_requests'",  # these are for CPUs
            ),
            test("linear", "triton_linear triton_experts"),
            test("sampler", "sampler_kernels kernelize flash_attn", "-k 'not cpp'"),
            test("self-tests", "self_tests"),
        ],
        side_by_side=True,
    ),
    Stage("memory", [test("memory", "gpu", "-k memory")]),  # alone on the GPU
    # Random engines and requests, with interrupts. Each engine compiles kernels.
    Stage("random", [Job("random", 200, f"{SUITE} random SECONDS {RANDOM_ENGINES} -m gpu")]),
    # Engines with blocks of 4 tokens say that they use torch, because Triton's need 16.
    Stage("example", [Job("example", 90, "python example.py", shown="nanovllm:|prefix cache")]),
    # Every shape and dtype of attention.
    Stage(
        "attention",
        [
            test_attention("decodes", "decodes and not beside"),
            test_attention("prefills", "prefills"),
            test_attention("chunks", "behind"),
            test_attention("mixed", "beside"),
            test("stores", "attention", "-k 'store_kvcache and triton'"),
        ],
        side_by_side=True,
    ),
    Stage("kernels", [Job("kernels", 120, "python -m nanovllm.kernels.bench")]),
    # Of a decode step, on this machine's CPU alone.
    Stage("host", [Job("host", 60, "python .ci/gpu/host.py 1 32 256")]),
    Stage(
        "single",
        [
            Job("single", 70, f"{ONE_REQUEST} --json"),
            Job("eager", 100, "python bench.py --set enforce_eager=True --json"),
        ],
    ),
    # Late, because Triton 3.6 and 3.7 had illegal accesses on Hopper in similar kernels.
    Stage(
        "risky",
        [
            Job("attend-256", 60, f"{CHECKS} attend bfloat16 256 1"),
            Job("attend-16", 60, f"{CHECKS} attend bfloat16 16 8"),
        ],
    ),
    # Accesses out of bounds, and races in shared memory, of kernels with matrix instructions.
    Stage("memcheck", [sanitize("memcheck", 128), sanitize("racecheck", 128)]),
    Stage("memcheck-256", [sanitize("memcheck", 256)]),
    # Latencies of the scheduling policies.
    Stage("latency", [Job("latency", 150, f"{ARRIVALS} --json", shown="mixed|prefill first")]),
    # Tiles of the attention kernel, to choose better ones.
    Stage("sweep", [Job("sweep", 400, "python .ci/gpu/sweep.py")]),
]
DRY = Stage(
    "dry",
    [
        Job("selections", 200, "python .ci/gpu/selections.py"),
        Job("sweep", 200, "python .ci/gpu/sweep.py"),
        Job("products", 200, "python .ci/gpu/products.py"),
        Job("sampler-kernel", 200, "python .ci/gpu/products.py sampler"),
        Job("steps", 200, "python .ci/gpu/steps.py"),
        Job("start", 200, "python .ci/gpu/start.py"),
        Job("host", 200, "python .ci/gpu/host.py 1 32"),
        Job("attend", 200, f"{CHECKS} attend float32 64 2 small"),
        Job("machine", 200, f"{CHECKS} machine"),
        Job("tokens", 200, f"{CHECKS} tokens"),
        Job("nccl", 200, f"{CHECKS} nccl"),
        Job("bench", 200, "python bench.py --num-seqs 2 --input-len 8 8 --output-len 4 4 --json"),
        test("kernelize", "kernelize", "-k gpu"),
    ],
    side_by_side=True,
)


def find_hardware() -> str | None:
    """Return the name of the GPU, or None if torch finds none."""
    program = "import torch; print(torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.stdout.strip() or None


def main(arguments: list[str]) -> int:
    start = time.monotonic()
    seconds = DEFAULT_SECONDS
    if arguments and arguments[0].isdecimal():
        seconds = int(arguments.pop(0))
    known = {stage.name: stage for stage in [*STAGES, DRY]}
    names = arguments or [stage.name for stage in STAGES]
    unknown = set(names) - known.keys()
    if unknown:
        print(f"unknown stage {', '.join(unknown)}: use {', '.join(known)}")
        return 2
    is_dry = names == ["dry"]
    hardware = "a dry run on the CPU" if is_dry else find_hardware()
    if hardware is None:
        print("torch finds no GPU; a CPU can only run: bash .ci/gpu/run 240 dry")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    runner = Runner(hardware, start + seconds - COLLECTING_SECONDS, one_thread=is_dry)
    left_over: list[str] = []
    try:
        for name in names:
            stage = known[name]
            if runner.seconds_left() < stage.least_seconds:
                left_over.append(name)
            else:
                runner.run(name, stage.jobs, stage.side_by_side)
    except KeyboardInterrupt:
        runner.failures.append("interrupted")
        left_over += names[names.index(name) :]
    if left_over:
        runner.note(f"left over: bash .ci/gpu/run {seconds} {' '.join(left_over)}")
    runner.finish()
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
