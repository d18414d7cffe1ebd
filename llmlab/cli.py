"""The command line: ``llmlab report | fetch | generate | bench | kernels | doctor``; each with ``--help``.

A bad argument, a missing file or a refused request ends with one line on stderr and exit code 2; a traceback is a bug.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

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
    bench.add_argument("--json", action="store_true", help="print the run with all its turns as JSON")
    bench.set_defaults(run=_bench)

    commands.add_parser(
        "kernels", help="compile every kernel for a GPU that need not be there; registers, spills, tensor cores"
    )

    doctor = commands.add_parser("doctor", help="say what this machine has, and what that means")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=_doctor)
    return parser


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
    print(result.to_json() if args.json else result.text())
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from llmlab.doctor import as_dicts, examine

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
