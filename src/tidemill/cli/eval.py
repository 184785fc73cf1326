"""`tidemill eval`: accuracy of a policy on a task, item by item, and two such runs compared.

The policy is a model folder in our engine, or any OpenAI-compatible endpoint. Results go to stdout, progress to stderr.
Run again with the same --out to go on where it stopped. Exit codes: 0 every attempt was graded, 1 some were lost to
infrastructure, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill import __version__
from tidemill.agent.endpoint import Endpoint, EndpointConfig, EndpointHarness, run_endpoint_episode
from tidemill.agent.episode import Harness, run_episode
from tidemill.agent.evaluation import EvalSpec, Evaluation, compare
from tidemill.agent.pool import SandboxPool
from tidemill.agent.rollout import Play
from tidemill.agent.scaffold import Scaffold
from tidemill.agent.task import TASKS, Split, Task, load_task
from tidemill.agent.tool import Tool, ToolLimits, load_tool
from tidemill.core.config import parse_config, read_environment, set_dotted
from tidemill.core.errors import ConfigError, InputError
from tidemill.core.files import write_json
from tidemill.core.ids import new_id
from tidemill.model.shipped import shipped_model, shipped_names

if TYPE_CHECKING:
    from tidemill.train.config import RunConfig

_ENDPOINT_TOKENS, _ENDPOINT_TURNS, _ENDPOINT_CONCURRENCY = 1024, 8, 16
_TASK_ITEMS = 256


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The command line, checked."""

    target: str
    config: RunConfig
    base: Path | None
    adapter: Path | None
    endpoint: str
    model: str
    api_key: str
    split: Split
    n: int
    k: int
    seed: int
    temperature: float
    max_tokens: int
    max_turns: int
    effort: str
    concurrency: int


def evaluate(
    target: Annotated[str, typer.Argument(help="Recipe (name or YAML file) or task (name or module:object).")] = "",
    base: Annotated[Path | None, typer.Option(help="Folder of a base model, or one of the package, for our own "
                                                   "engine.")] = None,
    adapter: Annotated[Path | None, typer.Option(help="Folder of an adapter on that base.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of a training run: its base and newest adapter.")] = None,
    endpoint: Annotated[str, typer.Option(help="OpenAI-compatible endpoint, e.g. http://127.0.0.1:8000/v1.")] = "",
    model: Annotated[str, typer.Option(help="Model to ask for at the endpoint; default: the first it lists.")] = "",
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the endpoint's key.")] = None,
    split: Annotated[Split, typer.Option(help="Which prompts.")] = Split.TEST,
    n: Annotated[int | None, typer.Option(min=1, help="Items; default: the recipe's, or 256 of a task.")] = None,
    k: Annotated[int, typer.Option(min=1, help="Attempts at each item.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Of problems and sampling; default: that of every run.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: 0 (greedy) for k = 1, else 1.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Sampled tokens: per episode in our engine, per turn "
                                                               "at an endpoint.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Assistant turns of an episode.")] = None,
    effort: Annotated[str, typer.Option(help="Thinking effort, sent to the endpoint as reasoning_effort.")] = "",
    concurrency: Annotated[int | None, typer.Option(min=1, help="Episodes under way at once.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; an earlier one is gone on with.")] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.PATH=VALUE",
                                                        help="Change a value of the recipe; may be repeated.")] = None,
    pair: Annotated[tuple[Path, Path] | None, typer.Option("--compare", metavar="A B",
                                                           help="Compare two finished runs instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Evaluate a task on our engine or any OpenAI-compatible endpoint."""
    if pair is not None:
        if target or endpoint or base or run:
            raise InputError("--compare takes two finished runs and nothing else", field="compare")
        found = compare(Evaluation.read(pair[0]), Evaluation.read(pair[1]))
        print(json.dumps(found) if as_json else "\n".join(_comparison_lines(found)))
        return
    if not target:
        raise InputError("name a recipe or a task", field="target", remedy="For example: tidemill eval toolcalc "
                         "--run runs/ID, or tidemill eval ledger --endpoint http://127.0.0.1:8000/v1.")
    if run is not None:
        if base or adapter:
            raise InputError("--run names base and adapter: --base and --adapter do not fit", field="run")
        base, adapter = _run_folders(run)
    if base is not None and not base.exists() and str(base) in shipped_names():
        base = shipped_model(str(base))
    if bool(base) == bool(endpoint):
        raise InputError("say who answers: either --base (or --run) or --endpoint", field="base")
    if adapter and not base:
        raise InputError("--adapter needs --base", field="adapter")
    config = _config(target, overrides or [])
    wanted = Wanted(
        target=target, config=config, base=base, adapter=adapter, endpoint=endpoint, model=model,
        api_key=_read_key(api_key_file), split=split, n=n if n is not None else _default_n(target, config, split), k=k,
        seed=_seed(seed), temperature=temperature if temperature is not None else (0.0 if k == 1 else 1.0),
        max_tokens=max_tokens or (_ENDPOINT_TOKENS if endpoint else config.agent.max_sampled_tokens),
        max_turns=max_turns or (_ENDPOINT_TURNS if endpoint else config.agent.max_turns), effort=effort,
        concurrency=concurrency or (_ENDPOINT_CONCURRENCY if endpoint else config.agent.concurrency),
    )
    folder = out or Path("evals") / new_id("eval")
    summary = asyncio.run(_evaluate(wanted, folder))
    print(json.dumps(summary) if as_json else "\n".join(_summary_lines(summary, folder)))
    if summary["missing"]:
        print(f"{summary['missing']} attempts were lost to infrastructure; run again with --out {folder} to repeat "
              "them", file=sys.stderr)
        raise typer.Exit(1)


async def _evaluate(wanted: Wanted, folder: Path) -> dict[str, Any]:
    task = load_task(wanted.config.task.name, wanted.config.task.options)
    size = task.size(wanted.split)
    if wanted.n > size:
        raise InputError(f"n = {wanted.n}: the {wanted.split} split of {wanted.target} has {size} prompts", field="n")
    tools = [load_tool(name) for name in task.tools]
    async with AsyncExitStack() as stack:
        if wanted.endpoint:
            play, policy, attach = await _endpoint_policy(stack, wanted, task, tools)
        else:
            play, policy, attach = await _engine_policy(stack, wanted, task, tools)
        evaluation = Evaluation.open(folder, _spec(wanted, policy))
        if evaluation.kept:
            print(f"{evaluation.kept} of {wanted.n * wanted.k} attempts are in {folder} already", file=sys.stderr)
        if evaluation.missing:
            if tools and task.needs_sandbox:
                attach(await stack.enter_async_context(_pool(wanted, tools, len(evaluation.missing))))
            with _progress(wanted.target) as progress:
                await evaluation.run(task, play, concurrency=wanted.concurrency, progress=progress)
            for reason, count in evaluation.failures.most_common(3):
                print(f"lost {count}: {reason}", file=sys.stderr)
        summary = evaluation.summary()
    write_json(folder / "summary.json", summary)
    return summary


def _spec(wanted: Wanted, policy: dict[str, str]) -> EvalSpec:
    agent = wanted.config.agent
    limits: dict[str, float] = {"max_turns": wanted.max_turns, "tool_timeout_s": agent.tool_timeout_s,
                                "tool_output_bytes": agent.tool_output_bytes}
    if not wanted.endpoint:
        limits["max_model_len"] = agent.max_model_len
    return EvalSpec(
        task=wanted.config.task.name, options=wanted.config.task.options, split=wanted.split.value, n=wanted.n,
        k=wanted.k, seed=wanted.seed, temperature=wanted.temperature,
        harness="endpoint" if wanted.endpoint else agent.scaffold, max_tokens=wanted.max_tokens, effort=wanted.effort,
        limits=limits, policy=policy, version=__version__,
    )


Attach = Callable[[SandboxPool], None]


async def _engine_policy(stack: AsyncExitStack, wanted: Wanted, task: Task, tools: list[Tool],
                         ) -> tuple[Play, dict[str, str], Attach]:
    """Our engine, embedded."""
    import torch

    from tidemill.engine import EmbeddedEngine, EngineSpec, load_core
    from tidemill.model.chat import ChatCodec, load_tokenizer
    from tidemill.train.parts import engine_config

    if wanted.effort:
        raise InputError(f"effort = {wanted.effort!r}: our harness gives an empty think channel or the model's default",
                         field="effort", remedy="Serve the model and evaluate it with --endpoint.")
    assert wanted.base is not None
    agent = replace(wanted.config.agent, max_sampled_tokens=wanted.max_tokens, max_turns=wanted.max_turns,
                    concurrency=wanted.concurrency)
    torch.set_num_threads(wanted.config.threads)
    codec = ChatCodec(load_tokenizer(wanted.base))
    spec = EngineSpec(model=wanted.base, adapter=wanted.adapter,
                      config=engine_config(replace(wanted.config, agent=agent)))
    engine = EmbeddedEngine(lambda: load_core(spec))
    stack.push_async_callback(engine.close)
    info = await engine.info()
    harness = Harness(engine=engine, task=task, tools=tools, settings=agent,
                      scaffold=Scaffold(codec, tools, declare=task.declare_tools))

    def attach(pool: SandboxPool) -> None:
        harness.pool = pool

    policy = {"model": info.model, "base_digest": info.base_digest, "adapter_digest": info.adapter_digest,
              "adapter_version": str(info.version), "numerics": info.numerics}
    return (lambda r: run_episode(harness, r.problem, r.draw, episode_id=r.episode_id)), policy, attach


async def _endpoint_policy(stack: AsyncExitStack, wanted: Wanted, task: Task, tools: list[Tool],
                           ) -> tuple[Play, dict[str, str], Attach]:
    """Somebody else's engine."""
    config = EndpointConfig(base_url=wanted.endpoint, model=wanted.model or "unknown", max_tokens=wanted.max_tokens,
                            max_turns=wanted.max_turns, effort=wanted.effort)
    if not wanted.model:
        async with Endpoint(config, api_key=wanted.api_key) as asked:
            served = await asked.models()
        if not served:
            raise InputError(f"{wanted.endpoint} lists no models", field="model", remedy="Name one with --model.")
        config = replace(config, model=served[0])
    endpoint = await stack.enter_async_context(Endpoint(config, api_key=wanted.api_key))
    agent = wanted.config.agent
    limits = ToolLimits(timeout_s=agent.tool_timeout_s, output_bytes=agent.tool_output_bytes)
    harness = EndpointHarness(endpoint=endpoint, task=task, tools=tools, limits=limits)

    def attach(pool: SandboxPool) -> None:
        harness.pool = pool

    return ((lambda r: run_endpoint_episode(harness, r.problem, r.draw)),
            {"endpoint": wanted.endpoint, "model": config.model}, attach)


@asynccontextmanager
async def _pool(wanted: Wanted, tools: list[Tool], attempts: int) -> AsyncIterator[SandboxPool]:
    """Sandboxes of this machine's service under a lease of their own."""
    from tidemill.sandbox.client import LocalSandboxClient
    from tidemill.sandbox.starting import ensure_daemon

    environment = read_environment()
    if environment.e2b_api_url:
        raise ConfigError("E2B_API_URL is set: evaluating through a remote sandbox service is not available yet",
                          field="E2B_API_URL", remedy="Unset it to use this machine's sandboxes.")
    await ensure_daemon(environment.state_dir, cache_dir=environment.cache_dir)
    client = LocalSandboxClient(environment.state_dir)
    section, agent = wanted.config.sandbox, wanted.config.agent
    try:
        async with SandboxPool(
            client, size=min(section.pool, wanted.concurrency, attempts), lease=new_id("eval"),
            template=section.template, backend=section.backend,
            sessions=tuple(dict.fromkeys(t.session for t in tools if t.session)),
            limits=ToolLimits(timeout_s=agent.tool_timeout_s, output_bytes=agent.tool_output_bytes),
        ) as pool:
            yield pool
    finally:
        await client.close()


def _config(target: str, overrides: list[str]) -> RunConfig:
    """The recipe, or a recipe around a task."""
    from tidemill.train.config import RunConfig, load_recipe, recipe_names

    if _is_recipe(target):
        return load_recipe(target, overrides)
    if target not in TASKS and ":" not in target:
        raise ConfigError(f"target = {target!r}: neither a recipe ({', '.join(recipe_names())}) nor a task "
                          f"({', '.join(TASKS)})", field="target", remedy="Your own: recipe.yaml, module:Task.")
    data: dict[str, Any] = {"name": "eval", "task": {"name": target}}
    for assignment in overrides:
        set_dotted(data, assignment)
    return parse_config(RunConfig, data, source=target)


def _is_recipe(target: str) -> bool:
    from tidemill.train.config import recipe_names

    return target in recipe_names() or target.endswith((".yaml", ".yml"))


def _default_n(target: str, config: RunConfig, split: Split) -> int:
    if _is_recipe(target):
        return config.eval.dev_n if split is Split.DEV else config.eval.test_n
    return min(_TASK_ITEMS, load_task(config.task.name, config.task.options).size(split))


def _seed(seed: int | None) -> int:
    """By default the problems every training run is measured on, so that results can be paired."""
    from tidemill.train.rollouts import EVAL_SEED

    return EVAL_SEED if seed is None else seed


def _run_folders(run: Path) -> tuple[Path, Path | None]:
    """Base and newest adapter of a training run."""
    if not (run / "base" / "config.json").is_file():
        raise InputError(f"{run} holds no base model", field="run", remedy="Give the folder of a training run.")
    adapters = sorted(p for p in (run / "adapters").glob("v*") if p.is_dir())
    return run / "base", adapters[-1] if adapters else None


def _read_key(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(f"cannot read {path}: {e}", field="api_key_file") from e


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on a terminal; nothing otherwise."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn(f"eval {what}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                  console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        job = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(job, completed=done, total=total)


def _summary_lines(summary: dict[str, Any], folder: Path) -> list[str]:
    k, limits = summary["k"], ", ".join(f"{name} {value:g}" for name, value in summary["limits"].items())
    lines = [
        f"{summary['task']}, {summary['split']} split: {summary['n']} items, k = {k}, temperature "
        f"{summary['temperature']:g}, seed {summary['seed']}",
        f"harness {summary['harness']}, effort {summary['effort'] or 'default'}, max_tokens {summary['max_tokens']}, "
        f"{limits}",
        "policy " + ", ".join(f"{name} {value[:19] if value.startswith('sha256:') else value}"
                              for name, value in summary["policy"].items() if value),
        _estimate_line(f"avg@{k}", summary[f"avg@{k}"]),
    ]
    lines += [_estimate_line(name, value) for name, value in summary["pass"].items() if k > 1]
    lines.append("outcomes " + (", ".join(f"{name} {count}" for name, count in summary["outcomes"].items()) or "none")
                 + f"; {summary['tool_calls']} tool calls, {summary['mean_sampled_tokens']:.1f} sampled tokens a try")
    lines.append(f"rows {folder / 'items.jsonl'}")
    return lines


def _estimate_line(name: str, value: dict[str, Any]) -> str:
    if value["point"] is None:
        return f"{name:<8} no item"
    return (f"{name:<8} {value['point']:6.1%}  [{value['lo95']:.1%}, {value['hi95']:.1%}]  n = {value['n']} "
            f"({value['method']})")


def _comparison_lines(found: dict[str, Any]) -> list[str]:
    d = found["difference"]
    lines = [
        f"A {found['a']}  {found['accuracy_a']:.1%}", f"B {found['b']}  {found['accuracy_b']:.1%}",
        f"B - A  {d['point']:+.1%}  [{d['lo95']:+.1%}, {d['hi95']:+.1%}] over {found['n']} items in both "
        f"({d['method']}, 95 %)",
    ]
    if "mcnemar" in found:
        m = found["mcnemar"]
        lines.append(f"only A right {m['only_a']}, only B right {m['only_b']}: McNemar p = {m['p']:.2g}")
    lines += [f"differs: {name}: {a} in A, {b} in B" for name, (a, b) in found["differing_settings"].items()]
    return lines

