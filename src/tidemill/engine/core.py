"""EngineCore: tokens in, tokens out. Synchronous, owned by one thread, no asyncio and no sockets inside.

Give it messages with `submit`, then call `step` until it has no work; replies come out of `step`. Everything a reply
says was done before the reply was made. The walk of a generation: submit -> scheduler -> batch -> runner -> sampler
-> log.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatchmethod

import numpy as np
import torch
from torch import Tensor

from tidemill.core.engine_api import EngineInfo, FinishReason, SamplingParams, TokenEvent
from tidemill.core.errors import BusyError, EngineError, InputError, NonFiniteError, NotFoundError, TidemillError
from tidemill.core.manifest import AdapterManifest
from tidemill.engine import messages as m
from tidemill.engine import sampling
from tidemill.engine.adapters import AdapterStore
from tidemill.engine.batch import I64, Batch, build_batch
from tidemill.engine.config import PAGE_SIZE, EngineConfig, plan_memory
from tidemill.engine.memory.limits import available_memory
from tidemill.engine.memory.pools import Pools
from tidemill.engine.memory.residency import Residency
from tidemill.engine.request import Phase, Request, Sequence
from tidemill.engine.runner import Runner
from tidemill.engine.scheduler import Scheduler, Work
from tidemill.engine.sleep import Sleeper
from tidemill.engine.weights import EngineWeights

_SCORE_LOGITS = 1 << 24
"""Logits held at once while scoring, so that long prompts over large vocabularies stay within memory."""


class EngineCore:
    """One model, its pools, sessions, adapter slots and queues."""

    def __init__(self, weights: EngineWeights, config: EngineConfig,
                 *, available: Callable[[], tuple[int, str]] = available_memory) -> None:
        """Plans memory (CapacityError if it does not fit) and allocates the pools."""
        self.config, self.weights = config, weights
        self.plan = plan_memory(config, slot_bytes=Pools.slot_bytes(weights.model),
                                page_bytes=Pools.page_bytes(weights.model), available=available)
        self.pools = Pools(weights.model, self.plan, poison=config.poison)
        self.residency = Residency(self.plan)
        self.scheduler = Scheduler(config, self.residency)
        self.runner = Runner(weights, self.pools, torch.from_numpy(self.residency.page_table))
        self.sampler = sampling.Sampler(self.plan.num_slots, weights.vocab_size)
        self.adapters = AdapterStore(weights.model, weights.base_digest, max_rank=config.max_lora_rank)
        self.sleeper = Sleeper(self.pools, weights)
        self._sessions: dict[str, Sequence] = {}
        self._active: dict[str, Request] = {}
        self._calls: dict[int, Request] = {}
        self._outbox: list[m.Reply] = []
        self._counts = dict.fromkeys(("steps", "rows", "sampled_tokens", "failed_requests"), 0)

    @property
    def has_work(self) -> bool:
        """Whether `step` would do something."""
        return bool(self._outbox) or (self.scheduler.has_work and not self.sleeper.asleep)

    @property
    def version(self) -> int:
        """Policy version served; 0 is the base without adapter."""
        return self.adapters.version

    def submit(self, message: m.Message) -> None:
        """Take one message. Refusals and answers come out of the next `step`; nothing is raised."""
        try:
            self._handle(message)
        except TidemillError as e:
            self._outbox.append(m.Failure(message.call_id, e))

    @torch.inference_mode()
    def step(self) -> list[m.Reply]:
        """One forward over whatever the scheduler chose, if anything; all replies since the last call."""
        if not self.sleeper.asleep:
            works = self.scheduler.schedule()
            if works:
                self._counts["steps"] += 1
                self._execute(works)
        replies, self._outbox = self._outbox, []
        return replies

    def session_ids(self, session_id: str) -> tuple[int, ...]:
        """The log of a session. Raises NotFoundError."""
        return tuple(self._session(session_id).ids)

    def check(self) -> None:
        """Raise EngineError if the pools' bookkeeping is inconsistent; for tests and after failures."""
        self.residency.check()

    # -- messages -------------------------------------------------------------------------------------------------

    @singledispatchmethod
    def _handle(self, message: object) -> None:
        raise EngineError(f"unknown message {type(message).__name__}")

    @_handle.register
    def _generate(self, message: m.Generate) -> None:
        request = message.request
        self._refuse_if_asleep()
        self.scheduler.check_room()
        if request.request_id in self._active:
            raise InputError(f"request_id {request.request_id!r} is already running", field="request_id")
        sampling.validate(request.sampling, self.weights.vocab_size)
        if request.session_id is None:
            sequence = Sequence(key=f"request {request.request_id}")
        else:
            sequence = self._session(request.session_id)
            if sequence.owner:
                raise BusyError(f"session {request.session_id!r} is working on request {sequence.owner!r}")
        self._check_tokens(request.ids, sequence, request.sampling)
        start = len(sequence.ids)
        sequence.ids.extend(request.ids)
        self._start(Request(
            request_id=request.request_id, call_id=message.call_id, sequence=sequence, sampling=request.sampling,
            stream=message.stream, start=start, prompt_end=len(sequence.ids), wants_scores=request.prompt_logprobs,
            stop_ids=frozenset(request.sampling.stop_token_ids),
        ))

    @_handle.register
    def _score(self, message: m.Score) -> None:
        self._refuse_if_asleep()
        self.scheduler.check_room()
        if not sampling.MIN_TEMPERATURE <= message.temperature <= 100.0:
            raise InputError(f"temperature = {message.temperature}: expected {sampling.MIN_TEMPERATURE} to 100",
                             field="temperature")
        params = SamplingParams(max_tokens=0)
        sequence = Sequence(key=f"score {message.call_id}")
        self._check_tokens(message.ids, sequence, params)
        sequence.ids.extend(message.ids)
        self._start(Request(
            request_id=f"score {message.call_id}", call_id=message.call_id, sequence=sequence, sampling=params,
            stream=False, start=0, prompt_end=len(sequence.ids), wants_scores=True,
            score_temperature=message.temperature, is_score=True,
        ))

    @_handle.register
    def _abort(self, message: m.Abort) -> None:
        request = self._active.get(message.request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        self._outbox.append(m.Result(message.call_id, None))

    @_handle.register
    def _cancel(self, message: m.Cancel) -> None:
        request = self._calls.get(message.target)
        if request is not None:
            self._finish(request, FinishReason.ABORT)

    @_handle.register
    def _open_session(self, message: m.OpenSession) -> None:
        if message.session_id in self._sessions:
            raise InputError(f"session {message.session_id!r} exists already", field="session_id")
        self._sessions[message.session_id] = Sequence(key=f"session {message.session_id}")
        self._outbox.append(m.Result(message.call_id, None))

    @_handle.register
    def _close_session(self, message: m.CloseSession) -> None:
        sequence = self._sessions.pop(message.session_id, None)
        if sequence is not None:
            if sequence.owner:
                self._finish(self._active[sequence.owner], FinishReason.ABORT)
            self.residency.drop(sequence)
        self._outbox.append(m.Result(message.call_id, None))

    @_handle.register
    def _begin_adapter(self, message: m.BeginAdapter) -> None:
        self.adapters.begin(AdapterManifest.from_json(message.manifest), message.config, message.num_chunks)
        self._outbox.append(m.Result(message.call_id, None))

    @_handle.register
    def _adapter_chunk(self, message: m.AdapterChunk) -> None:
        self.adapters.chunk(message.index, message.names, message.data)
        self._outbox.append(m.Result(message.call_id, None))

    @_handle.register
    def _commit_adapter(self, message: m.CommitAdapter) -> None:
        digest = self.adapters.commit(message.version)
        # Everything resident was computed under the old weights: all of it goes, and running requests recompute.
        self.scheduler.preempt_all()
        self._outbox.append(m.Result(message.call_id, digest))

    @_handle.register
    def _abort_adapter(self, message: m.AbortAdapter) -> None:
        self.adapters.abort()
        self._outbox.append(m.Result(message.call_id, None))

    @_handle.register
    def _sleep(self, message: m.Sleep) -> None:
        self.sleeper.check(message.tags)
        self.scheduler.preempt_all()
        self._outbox.append(m.Result(message.call_id, self.sleeper.sleep(message.tags)))

    @_handle.register
    def _wake(self, message: m.Wake) -> None:
        self._outbox.append(m.Result(message.call_id, self.sleeper.wake(message.tags)))

    @_handle.register
    def _info(self, message: m.Info) -> None:
        self._outbox.append(m.Result(message.call_id, self.info()))

    def info(self) -> EngineInfo:
        """What is served, and counters since start (`stats`)."""
        stats = {k: float(v) for k, v in self._counts.items()} | {
            "running": float(len(self.scheduler.running)), "waiting": float(len(self.scheduler.waiting)),
            "sessions": float(len(self._sessions)), "preemptions": float(self.scheduler.num_preempted),
            "evictions": float(self.residency.num_evicted), "free_pages": float(self.residency.pages.num_free),
            "free_slots": float(self.residency.slots.num_free), "pool_bytes": float(self.plan.pool_bytes),
            "slot_bytes": float(self.plan.slot_bytes), "page_bytes": float(self.plan.page_bytes),
        }
        return EngineInfo(
            model=self.weights.name, base_digest=self.weights.base_digest, adapter_digest=self.adapters.digest,
            version=self.version, vocab_size=self.weights.vocab_size, max_model_len=self.config.max_model_len,
            max_running=self.config.max_running, num_pages=self.plan.num_pages, page_size=PAGE_SIZE,
            num_slots=self.plan.num_slots, numerics=self.runner.numerics, asleep=self.sleeper.tags, stats=stats,
        )

    # -- requests -------------------------------------------------------------------------------------------------

    def _start(self, request: Request) -> None:
        request.sequence.owner = request.request_id
        self._active[request.request_id] = request
        self._calls[request.call_id] = request
        self.scheduler.add(request)

    def _finish(self, request: Request, reason: FinishReason, error: str = "") -> None:
        """End a request and answer its caller. A failed one leaves nothing resident: its state may hold NaN."""
        sequence = request.sequence
        is_session = self._sessions.get(sequence.key.removeprefix("session ")) is sequence
        if request.phase is not Phase.DONE:
            self.scheduler.finish(request, keep=is_session and reason is not FinishReason.ERROR)
        sequence.owner = ""
        del self._active[request.request_id], self._calls[request.call_id]
        if reason is FinishReason.ERROR:
            self._counts["failed_requests"] += 1
        if not request.is_score:
            self._outbox.append(m.Result(request.call_id, request.completion(reason, error)))
        elif reason is FinishReason.ERROR:
            self._outbox.append(m.Failure(request.call_id, NonFiniteError(error)))
        elif reason is FinishReason.ABORT:
            self._outbox.append(m.Failure(request.call_id, EngineError("scoring was aborted")))
        else:
            self._outbox.append(m.Result(request.call_id, tuple(request.scores)))

    def _session(self, session_id: str) -> Sequence:
        if session_id not in self._sessions:
            raise NotFoundError(f"no session {session_id!r}", remedy="Open it first.")
        return self._sessions[session_id]

    def _refuse_if_asleep(self) -> None:
        if self.sleeper.asleep:
            raise BusyError(f"the engine sleeps ({', '.join(self.sleeper.tags)})", remedy="Wake it first.")

    def _check_tokens(self, ids: tuple[int, ...], sequence: Sequence, params: SamplingParams) -> None:
        total = len(sequence.ids) + len(ids)
        limit = self.config.max_model_len
        if total < 1:
            raise InputError("ids is empty and there is no earlier token to continue from", field="ids")
        if total > limit or (params.max_tokens and total == limit):
            raise InputError(
                f"{total} tokens do not fit a context of max_model_len = {limit}"
                + (" with at least one to sample" if total == limit else ""), field="ids",
                remedy="Shorten the prompt or serve with a larger max_model_len.",
            )
        if ids and not (min(ids) >= 0 and max(ids) < self.weights.vocab_size):
            bad = next(t for t in ids if not 0 <= t < self.weights.vocab_size)
            raise InputError(f"ids holds {bad}: expected 0 to {self.weights.vocab_size - 1}", field="ids")

    # -- one step -------------------------------------------------------------------------------------------------

    def _execute(self, works: list[Work]) -> None:
        for work in works:
            if work.request.cached < 0:
                work.request.cached = work.start
                self.sampler.admit(work.request.sequence.slot, work.request.sampling)
            elif work.start == 0:
                self.sampler.admit(work.request.sequence.slot, work.request.sampling)
        real = [w for w in works if w.count]
        if real:
            self.pools.prepare(self.residency)
            batch = build_batch(*_arrays(real), page_table=self.residency.page_table)
            self._counts["rows"] += batch.num_rows
            hidden = self.runner.forward(batch, self.adapters.live)
            real = [real[i] for i in batch.order.tolist()]
            for work in real:
                work.request.sequence.computed = work.start + work.count
            self._score_rows(real, batch, hidden)
            self._sample_rows(real, batch, hidden)
        for work in works:
            request = work.request
            if request.phase is not Phase.DONE and not request.sampling.max_tokens \
                    and request.sequence.computed >= request.target:
                self._finish(request, FinishReason.LENGTH)

    def _sample_rows(self, works: list[Work], batch: Batch, hidden: Tensor) -> None:
        chosen = [i for i, w in enumerate(works)
                  if w.reaches_end and w.request.phase is Phase.RUNNING and w.request.sampling.max_tokens]
        if not chosen:
            return
        index = np.asarray(chosen, dtype=np.int64)
        rows = batch.rows_of(index, batch.counts[index] - 1)
        requests = [works[i].request for i in chosen]
        logits = self.runner.logits(hidden, torch.from_numpy(rows))
        slots = batch.slots.numpy()[index]
        positions = np.fromiter((len(r.sequence.ids) for r in requests), dtype=np.int64, count=len(requests))
        drawn = self.sampler.draw(logits, requests, slots, positions)
        for row, request in enumerate(requests):
            if drawn.failed[row]:
                self._finish(request, FinishReason.ERROR,
                             f"a logit is not finite at position {len(request.sequence.ids)}")
            else:
                self._append(request, drawn.ids[row], drawn.logprobs[row], drawn.model_logprobs[row],
                             drawn.top.get(row, ()))

    def _append(self, request: Request, token: int, logprob: float, model_logprob: float,
                top: tuple[tuple[int, float], ...]) -> None:
        sequence = request.sequence
        position = len(sequence.ids)
        sequence.ids.append(token)
        request.ids.append(token)
        request.logprobs.append(logprob)
        request.model_logprobs.append(model_logprob)
        request.versions.append(self.adapters.version)
        if request.sampling.top_logprobs:
            request.top.append(top)
        if sampling.needs_counts(request.sampling):
            request.counts[token] = request.counts.get(token, 0) + 1
        self._counts["sampled_tokens"] += 1
        if request.stream:
            self._outbox.append(m.Token(request.call_id, TokenEvent(
                request_id=request.request_id, token_id=token, logprob=logprob, model_logprob=model_logprob,
                position=position, version=self.adapters.version, top=top,
            )))
        if token in request.stop_ids:
            self._finish(request, FinishReason.STOP)
        elif len(request.ids) >= request.sampling.max_tokens or position + 1 >= self.config.max_model_len:
            self._finish(request, FinishReason.LENGTH)

    def _score_rows(self, works: list[Work], batch: Batch, hidden: Tensor) -> None:
        """Log-probs of given tokens that this step's rows predict."""
        spans: list[tuple[Request, I64]] = []
        for i, work in enumerate(works):
            request = work.request
            first = max(work.start, request.next_score - 1)
            last = min(work.start + work.count, request.prompt_end - 1)
            if request.wants_scores and first < last:
                tokens = np.arange(first - work.start, last - work.start)
                spans.append((request, batch.rows_of(np.full_like(tokens, i), tokens)))
        if not spans:
            return
        rows = np.concatenate([r for _, r in spans])
        targets = np.concatenate([
            np.asarray(request.sequence.ids[request.next_score : request.next_score + len(r)], dtype=np.int64)
            for request, r in spans
        ])
        temperatures = np.concatenate([np.full(len(r), request.score_temperature, dtype=np.float32)
                                       for request, r in spans])
        step = max(1, _SCORE_LOGITS // self.weights.vocab_size)
        scores: list[float] = []
        finite: list[bool] = []
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            logits = self.runner.logits(hidden, torch.from_numpy(rows[part])).float()
            finite += torch.isfinite(logits).all(-1).tolist()
            logp = (logits / torch.from_numpy(temperatures[part]).unsqueeze(-1)).log_softmax(-1)
            scores += logp.gather(1, torch.from_numpy(targets[part]).unsqueeze(-1)).squeeze(-1).tolist()
        done = 0
        for request, r in spans:
            end = done + len(r)
            if all(finite[done:end]):
                request.scores += scores[done:end]
            else:
                at = request.next_score + finite[done:end].index(False)
                self._finish(request, FinishReason.ERROR, f"a logit is not finite at position {at}")
            done = end


def _arrays(works: list[Work]) -> tuple[I64, I64, I64, I64]:
    """slots, starts, counts and tokens of the step, for `build_batch`."""
    tokens: list[int] = []
    for work in works:
        tokens += work.request.sequence.ids[work.start : work.start + work.count]
    n = len(works)
    return (
        np.fromiter((w.request.sequence.slot for w in works), dtype=np.int64, count=n),
        np.fromiter((w.start for w in works), dtype=np.int64, count=n),
        np.fromiter((w.count for w in works), dtype=np.int64, count=n),
        np.asarray(tokens, dtype=np.int64),
    )
