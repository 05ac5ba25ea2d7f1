# SPDX-License-Identifier: Apache-2.0
"""A request on its way through the engine: its spans, where their KV lies, and how far it got."""

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lazyattention.cache.chunk import Chunk, ChunkKey
from lazyattention.engine.outputs import CompletionOutput, DocumentReuse, Timings
from lazyattention.engine.sampling_params import SamplingParams
from lazyattention.errors import LazyAttentionError
from lazyattention.reuse import PromptLayout, ReuseMethod, ReusePlan, SpanUse
from lazyattention.reuse.recompute import RECOMPUTE_POLICIES, ChosenBlocks, Evidence, Recompute

if TYPE_CHECKING:
    from lazyattention.engine.detokenizer import Detokenizer
    from lazyattention.engine.question_attention import QuestionAttention
    from lazyattention.engine.text_chain import TextChain


class RequestStatus(enum.Enum):
    """Where a sequence is."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SpanState:
    """One span of a running sequence.

    Attributes:
        use: Whose KV serves it.
        token_ids: Its tokens; the last span grows with the output.
        start: Position of its first token.
        source: Index of the plan's span it is, or is a part of.
        is_part: True if it reads a part of its chunk (SHARED): other blocks are recomputed.
        chunk_start: First token of this part, index into the chunk; where a block begins.
        chunk_key: What its chunk is stored under (SHARED, COPIED).
        chunk: The stored chunk it reads (SHARED) or copies (COPIED); held by the sequence. None for a hidden one whose
            chunk is stored already.
        block_ids: The sequence's own blocks (TEXT, PRIVATE, COPIED); it holds one reference on each.
        num_computed: Tokens of its own whose KV exists.
    """

    use: SpanUse
    token_ids: list[int]
    start: int
    source: int = 0
    is_part: bool = False
    chunk_start: int = 0
    chunk_key: ChunkKey | None = None
    chunk: Chunk | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0

    @property
    def num_remaining(self) -> int:
        """Tokens the sequence itself must still compute here; a shared chunk is somebody's else work."""
        return 0 if self.use is SpanUse.SHARED else len(self.token_ids) - self.num_computed

    def chunk_blocks(self, block_size: int) -> list[int]:
        """Return the blocks of its part of the chunk."""
        assert self.chunk is not None
        end = self.chunk_start + len(self.token_ids)
        return self.chunk.block_ids[self.chunk_start // block_size : -(-end // block_size)]


@dataclass(slots=True, eq=False)
class RequestGroup:
    """What a user sent: one prompt, `n` completions.

    Attributes:
        request_id: Unique among live requests.
        layout: The prompt.
        prompt_token_ids: All its tokens in order.
        params: How to sample.
        method: How stored KV is used.
        plan: How each of its spans is served.
        scope: The tenant.
        timings: When things happened.
        deadline_s: Monotonic seconds after which it is ended, or None.
        recompute: Which blocks of its documents it computes anew; None = none.
        chosen_blocks: These blocks; None until they are chosen.
        sequences: One per completion.
        documents: The reuse report, made at the first admission, and again when blocks to recompute were chosen.
        must_report: True until it is made.
        found: Per span of the plan, what the first admission found; None before.
        num_found_before: Tokens of text in front of all documents that it found.
        num_reused_tokens: Prompt tokens not computed for this request.
        num_recomputed_tokens: Document tokens in blocks that were computed anew.
        num_selection_tokens: Tokens computed only to choose these blocks, in the share of the layers they went through.
        error: Why it failed.
        forget_at_end: Scopes and ids of documents that were deleted while this request had them.
    """

    request_id: str
    layout: PromptLayout
    prompt_token_ids: list[int]
    params: SamplingParams
    method: ReuseMethod
    plan: ReusePlan
    scope: str
    timings: Timings
    deadline_s: float | None = None
    recompute: Recompute | None = None
    chosen_blocks: ChosenBlocks | None = None
    sequences: "list[Sequence]" = field(default_factory=list)
    documents: list[DocumentReuse] = field(default_factory=list)
    must_report: bool = True
    found: list[str] | None = None
    num_found_before: int = 0
    num_reused_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_selection_tokens: float = 0.0
    error: LazyAttentionError | None = None
    forget_at_end: set[tuple[str, str]] = field(default_factory=set)

    def uses(self, document_id: str, scope: str) -> bool:
        """True if the prompt contains this document of this scope."""
        spans = self.layout.spans
        return any(span.document_id == document_id and (span.scope or self.scope) == scope for span in spans)

    @property
    def missing_evidence(self) -> Evidence | None:
        """What must be measured before the blocks to recompute can be chosen; None when there is nothing to choose.

        Until then the request runs as if nothing were recomputed, and samples nothing.
        """
        if self.recompute is None or self.chosen_blocks is not None:
            return None
        return RECOMPUTE_POLICIES[self.recompute.policy].evidence

    @property
    def is_finished(self) -> bool:
        """True once every completion ended."""
        return all(sequence.status is RequestStatus.FINISHED for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One completion of a request, as the scheduler sees it.

    Attributes:
        group: The request.
        index: Which of its completions.
        seed_key: Makes its random draws its own.
        detokenizer: Its text so far.
        max_tokens: Most tokens it may generate, bounded by the model's length.
        status: Where it is.
        spans: Its spans while running, as its request's plan has them.
        chain: Its place in the store of text KV while running; None if its method reuses no text.
        output_token_ids: Generated so far; they survive preemption.
        output: What the user sees of it.
        num_skipped: Younger requests that overtook it while it waited.
        num_preemptions: How often its blocks were taken.
        question_attention: Collects the evidence for choosing blocks, while running without it.
        decoding_spans: The `spans` that were all there when it was last asked; they stay so until others replace them.
    """

    group: RequestGroup
    index: int
    seed_key: int
    detokenizer: "Detokenizer"
    max_tokens: int
    status: RequestStatus = RequestStatus.WAITING
    spans: list[SpanState] = field(default_factory=list)
    chain: "TextChain | None" = None
    output_token_ids: list[int] = field(default_factory=list)
    output: CompletionOutput = field(default_factory=lambda: CompletionOutput(0))
    num_skipped: int = 0
    num_preemptions: int = 0
    question_attention: "QuestionAttention | None" = None
    decoding_spans: list[SpanState] | None = None

    @property
    def is_decoding(self) -> bool:
        """True when only the last sampled token is left to compute, and everything it looks at is there.

        After preemption a chunk may be gone while the text behind it is still stored.
        """
        if self.decoding_spans is self.spans:
            return True
        if not self.output_token_ids or self.num_remaining != 1:
            return False
        if not all(span.chunk is None or span.chunk.is_ready for span in self.spans):
            return False
        self.decoding_spans = self.spans
        return True

    @property
    def num_remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return sum(span.num_remaining for span in self.spans)

    @property
    def is_waiting_for_sibling(self) -> bool:
        """True while the group's first completion still computes the prompt that this one will reuse."""
        if self.index == 0 or not self.group.method.reuses_text:
            return False
        first = self.group.sequences[0]
        return first.status is not RequestStatus.FINISHED and not first.output_token_ids
