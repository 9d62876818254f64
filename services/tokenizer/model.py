# ruff: noqa: TID251, RUF100 - an adapter: the library it wraps is told through the environment how to log
"""One model's tokenizer and chat template, as the engine has them.

transformers' Jinja renders, `tokenizers` encodes. Both come from one local directory; nothing is downloaded. When it is
loaded the tokenizer is *asked* whether encoding in pieces gives the ids of the whole (see `segments.py`): structure
first, then samples. If not at long texts, they are not cut; if not even at special tokens, every prompt is encoded
whole and nothing can be memoised.

Owns: transformers, tokenizers.   Must not know: tenants, the memo, threads (callers choose where it runs).
Source: facts/index.md (the batch call releases the GIL, `encode` does not); vLLM `renderers/hf.py` for what reaches
`apply_chat_template`."""

import json
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..bus import revision
from ..bus.errors import BadRequest, ConfigInvalid
from . import render
from .segments import Segmenter, Special, has_cut
from .sentinels import Shield

# Every script and boundary that has ever been cut wrongly: digits, marks, runs of white space, emoji, code.
SAMPLES = (
    "The quick brown fox can't jump; it's 12345.67 metres, isn't it?  Two spaces,\ttab\n\nnew paragraph\n- a list\n",
    "Он сказал: «Съешь же ещё этих мягких французских булок, да выпей чаю». 42-й раз, ё́ и й.\nНовая строка",
    "人工智能正在改变世界。我们需要更快的缓存，而且要安全、可靠。价格是１２３元。Mixed 中文 and English。\n\n下一段",
    "日本語のテキスト。カタカナ、ひらがな。한국어 문장입니다 그리고 계속. العربية نص قصير هنا. हिन्दी में एक वाक्य है।",
    "👩‍👩‍👧‍👦 family 🇩🇪 flags ☕️ e\u0301 combining é precomposed ﬁ ligature ½ Ⅷ ² x² y³ word½ next",
    "def f(x: int) -> str:\n    if x > 0 and x != 10:\n        return f'{x}'\n\n\n\treturn \"\"  # done \r\n\r\nend",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2, 3]}}\n<tool_call>\n</tool_call>',
    " leading space and trailing space ",
    "word . word , word ; word\u00a0nbsp word\u200bzwsp word\u3000ideographic WORD Word wOrd ALLCAPS camelCaseWord",
    "a b c d e f g\nh\ni\nj k\n l \n m\n\n n o。p，q、r 。s",
    "\n",
    " ",
    "x",
)

_CUTTABLE_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Split"}
_CUTTABLE_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
# Arguments of the render call itself, which a client may not give under another name.
_RESERVED_KWARGS = frozenset(
    "messages conversation conversations chat_template tools documents add_generation_prompt continue_final_message "
    "tokenize sanitize_control_tokens padding truncation max_length return_tensors return_dict tokenizer_kwargs "
    "return_assistant_tokens_mask".split()
)


class TokenizerModel:
    """Make it with `load`. Its methods keep no state and may run in any thread."""

    def __init__(self, directory: Path, revisions: revision.Revisions, hf: Any) -> None:
        self.revisions = revisions
        self._hf = hf
        whole: Tokenizer = hf.backend_tokenizer
        whole.no_truncation()
        whole.no_padding()
        whole.encode_special_tokens = False
        self._plain = Tokenizer.from_str(whole.to_str())
        self._plain.encode_special_tokens = True
        vocabulary = whole.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.longest_token_chars = max(len(token) for token in vocabulary)
        added = whole.get_added_tokens_decoder()
        self.specials = [
            Special(token.content, i, token.lstrip, token.rstrip, token.single_word)
            for i, token in sorted(added.items())
            if token.special and token.content
        ]
        self.prefix, self.suffix = _affixes(whole)
        self.segmenter, self.segmented = _segmenter(self, whole, added.values())
        self._whole = None if self.segmented else whole
        self.template: str = hf.chat_template if isinstance(hf.chat_template, str) else ""
        templates = hf.chat_template.values() if isinstance(hf.chat_template, dict) else [self.template]
        self.shield = Shield((special.content for special in self.specials), "".join(templates))
        # Whether a template prints the current time: then no two prompts of it need be alike.
        self.uses_clock = False
        self._arguments: frozenset[str] = frozenset()
        self.content_format: render.ContentFormat = "string"
        self._named_tokens: dict[str, str] = hf.special_tokens_map
        self._compiled: dict[str, Any] = {}
        named = hf.chat_template if isinstance(hf.chat_template, dict) else {"default": self.template}
        for name, template in named.items():
            if not template:
                continue
            parsed = _Template(template, directory)
            self._compiled[name] = parsed.compiled
            self.uses_clock |= parsed.prints_time
            self._arguments |= parsed.arguments - _RESERVED_KWARGS
            if parsed.loops_over_content:
                self.content_format = "openai"

    @classmethod
    def load(cls, directory: Path) -> "TokenizerModel":
        """:raises ConfigInvalid: no tokenizer there that `tokenizers` can run."""
        revisions = revision.of_directory(directory)
        try:
            auto = _transformers().AutoTokenizer
            hf = auto.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
            if not hf.is_fast:
                raise ConfigInvalid("has no fast tokenizer.", field=str(directory))
            return cls(directory, revisions, hf)
        except ConfigInvalid:
            raise
        except BaseException as exc:  # a foreign file in foreign code: any exception means that it cannot be used
            if not (isinstance(exc, Exception) or _is_panic(exc)):
                raise
            raise ConfigInvalid(
                f"cannot be loaded ({type(exc).__name__}: {' '.join(str(exc).split())[:300]}).",
                field=str(directory),
                remedy="Give a local Hugging Face directory with a tokenizer.json, or with a vocabulary and the"
                " tokenizer_class that reads it.",
            ) from exc

    @property
    def chats(self) -> bool:
        """Whether there is a chat template at all."""
        return bool(self._compiled)

    def accepts(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Those template arguments that the template reads. vLLM drops the others as well."""
        return {name: value for name, value in kwargs.items() if name in self._arguments}

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        chat: render.Chat,
        kwargs: dict[str, Any],
    ) -> str:
        """The prompt's text. `chat` only says whether and how it is left open at its end.

        :raises BadRequest: the template refuses these messages, or fails on them."""
        try:
            if chat.continue_final_message:
                return self._continued(messages, tools, documents, kwargs)
            text: str = self._template(tools).render(
                messages=[_as_transformers_gives_it(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=chat.add_generation_prompt,
                **{**self._named_tokens, **kwargs},
            )
            return text
        except RecursionError as exc:
            raise BadRequest("Values are nested too deeply.", field="messages") from exc
        except Exception as exc:  # templates raise what they like; it is always the input they could not use
            raise BadRequest(
                f"The model's chat template refuses them: {str(exc)[:200] or type(exc).__name__}", field="messages"
            ) from exc

    def _template(self, tools: list[dict[str, Any]] | None) -> Any:
        """The compiled template that `apply_chat_template` would choose."""
        named = self._compiled.get("tool_use") if tools is not None else None
        template = named or self._compiled.get("default")
        if template is None:
            raise ValueError("it has several templates and no default")
        return template

    def _continued(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        documents: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> str:
        """Where the last message ends in the rendered text is for transformers to find."""
        text: str = self._hf.apply_chat_template(
            messages, tools=tools, documents=documents, continue_final_message=True, tokenize=False, **kwargs
        )
        return text

    def token_id(self, token: str) -> int | None:
        """Of a whole token by its text; None if there is no such token."""
        found: int | None = self._plain.token_to_id(token)
        return found

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Ids of each text, u32 LE; special tokens in them are text. Releases the GIL while it encodes."""
        encodings = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        return [pack(encoding.ids) for encoding in encodings]

    def encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        """As `encode`, but special tokens are meant: for tokenizers whose prompts cannot be segmented."""
        assert self._whole is not None
        encodings = self._whole.encode_batch_fast(list(texts), add_special_tokens=False)
        return [pack(encoding.ids) for encoding in encodings]

    def __repr__(self) -> str:
        how = "whole" if not self.segmented else "in pieces" if self.segmenter.cuttable else "by special tokens"
        return f"<TokenizerModel {self.vocab_size} tokens, {how}, content as {self.content_format}>"


def _is_panic(exc: BaseException) -> bool:
    """Whether Rust code panicked: pyo3 raises that as a BaseException, which would pass every edge and end the process.
    Its class can be imported from nowhere."""
    return type(exc).__name__ == "PanicException"


def pack(ids: Sequence[int]) -> bytes:
    """u32 LE (as the machine has them), 4 bytes a token.

    :raises TypeError: an id is not an int.   :raises OverflowError: it is below 0 or over 32 bits."""
    return array("I", ids).tobytes()


def _transformers() -> Any:
    """transformers, whose import takes seconds: only who loads a tokenizer pays. What it has to say goes to the log of
    this process, not to stderr in lines of its own."""
    # While it is imported it logs by itself, that there is no torch.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.logging.disable_default_handler()
    transformers.logging.enable_propagation()
    return transformers


def _as_transformers_gives_it(message: dict[str, Any]) -> dict[str, Any]:
    """A message as `apply_chat_template` hands it to the template: without null fields, reasoning under every name.
    (It copies all values as well; these are plain JSON, and the sandbox lets no template change them.)"""
    given = {name: value for name, value in message.items() if value is not None}
    if "reasoning_content" in given:
        given = {"thinking": given["reasoning_content"], **given}
    return given


def _affixes(tokenizer: Tokenizer) -> tuple[bytes, bytes]:
    """What `add_special_tokens` puts before and after a text."""
    bare = tokenizer.encode("x", add_special_tokens=False).ids
    dressed = tokenizer.encode("x", add_special_tokens=True).ids
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return pack(dressed[:start]), pack(dressed[start + len(bare) :])
    raise ConfigInvalid("changes a text's own ids when it adds special tokens.", field="tokenizer")


def _segmenter(model: TokenizerModel, whole: Tokenizer, added: Any) -> tuple[Segmenter, bool]:
    """The segmenter this tokenizer allows, and whether it allows one at all."""
    if _may_be_cut(json.loads(whole.to_str()), added):
        segmenter = Segmenter(model.specials, cuttable=True)
        if _agrees(model, whole, segmenter):
            return segmenter, True
    segmenter = Segmenter(model.specials, cuttable=False)
    return segmenter, _agrees(model, whole, segmenter)


def _may_be_cut(description: dict[str, Any], added: Any) -> bool:
    """Whether the tokenizer is of the family `segments.py` speaks of, as far as its description tells."""
    pre_tokenizers = list(_flattened(description.get("pre_tokenizer"), "pretokenizers"))
    return (
        description["model"].get("type") == "BPE"
        and not description["model"].get("dropout")
        and bool(pre_tokenizers)
        and all(step["type"] in _CUTTABLE_PRE_TOKENIZERS for step in pre_tokenizers)
        and not any(step.get("add_prefix_space") for step in pre_tokenizers)
        and any(step["type"] == "Split" or step.get("use_regex") for step in pre_tokenizers)
        and all(
            step["type"] in _CUTTABLE_NORMALIZERS for step in _flattened(description.get("normalizer"), "normalizers")
        )
        and not any(
            has_cut(token.content) or token.lstrip or token.rstrip or token.single_word
            for token in added
            if not token.special
        )
    )


def _flattened(step: dict[str, Any] | None, children: str) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for child in step[children]:
            yield from _flattened(child, children)
    else:
        yield step


def _agrees(model: TokenizerModel, whole: Tokenizer, segmenter: Segmenter) -> bool:
    """Whether pieces give the ids of the whole, on samples cut wherever they can be, with and without special tokens
    between them."""
    marks = [special.content for special in model.specials[:8]]
    texts = [*SAMPLES, "".join(SAMPLES)]
    for i, mark in enumerate(marks):
        ordered = SAMPLES[i:] + SAMPLES[:i]
        texts += [mark.join(ordered), f"{mark}user\n{ordered[0]}{mark}\n{mark}{mark}{ordered[1]}{mark}"]
    for text in texts:
        pieces: list[bytes] = []
        for part in segmenter.split(text):
            pieces += [pack([part])] if isinstance(part, int) else model.encode(segmenter.cut(part, 1))
        if b"".join(pieces) != pack(whole.encode(text, add_special_tokens=False).ids):
            return False
    return True


class _Template:
    """What a chat template's source tells, by transformers' own Jinja environment: `arguments` are the names it takes
    from its caller (those of Jinja's and transformers' functions are not among them)."""

    def __init__(self, source: str, directory: Path) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template, _get_template_variables

        try:
            self.compiled = _compile_jinja_template(source)
            nodes = list(_walk(self.compiled.environment.parse(source)))
            self.arguments: frozenset[str] = frozenset(_get_template_variables(source))
        except Exception as exc:  # Jinja's own errors, and what its compiler passes on
            raise ConfigInvalid(f"has a chat template that is no Jinja: {exc}", field=str(directory)) from exc
        self.loops_over_content = any(_is_loop_over_content(node) for node in nodes)
        self.prints_time = any(getattr(node, "name", None) == "strftime_now" for node in nodes)


def _is_loop_over_content(node: Any) -> bool:
    """Whether this is a `for` over a message's content: such a template wants a list of parts (as vLLM decides it)."""
    if type(node).__name__ != "For":
        return False
    over = node.iter
    while type(over).__name__ in ("Filter", "Test") or type(getattr(over, "arg", None)).__name__ == "Slice":
        over = over.node
    return getattr(over, "attr", None) == "content" or getattr(getattr(over, "arg", None), "value", None) == "content"


def _walk(node: Any) -> Iterator[Any]:
    yield node
    for child in node.iter_child_nodes():
        yield from _walk(child)
