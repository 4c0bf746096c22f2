"""A conversation on its way into the engine: its prompt, and how the answer will be read."""

from collections.abc import Mapping
from typing import Any

from kdtree_engine.checks import shown
from kdtree_engine.tokenizer import Tokenizer
from kdtree_engine.tool_calls import ChatParser, count_calls

# Arguments of their own, which a template's variables must not replace.
_ARGUMENTS = ("messages", "tools")
# Enough ids to see how a prompt ends.
_TAIL = 16


class ChatPrompt:
    """The ids of a conversation and what is needed to read the answer to it.

    Raises ValueError for a conversation that the template refuses and for bad variables.
    """

    def __init__(self, tokenizer: Tokenizer, messages: Any, tools: Any, variables: Any) -> None:
        variables = {} if variables is None else variables
        if not isinstance(variables, Mapping) or not all(isinstance(k, str) for k in variables):
            raise ValueError(f"chat_template_kwargs is {shown(variables)}, want a dict of names")
        for name in _ARGUMENTS:
            if name in variables:
                raise ValueError(
                    f"chat_template_kwargs has {name}, which is an argument of its own"
                )
        self.token_ids = chat_prompt_ids(tokenizer, messages, tools=tools, **variables)
        self._tokenizer = tokenizer
        self._tools = list(tools or ())
        self._calls_before = count_calls(messages)

    def parser(self) -> ChatParser:
        """A parser for the answer."""
        end = self._tokenizer.decode(self.token_ids[-_TAIL:]).rstrip()
        template = self._tokenizer.chat_template or ""
        return ChatParser(
            thinking=end.endswith("<think>"),
            tools=self._tools,
            calls_before=self._calls_before,
            written_think="<think>" in template
            and "</think>" not in self._tokenizer.special_tokens,
        )


def chat_prompt_ids(tokenizer: Tokenizer, messages: Any, **options: Any) -> list[int]:
    """The ids of a conversation in the template, with the token that begins every prompt."""
    ids = tokenizer.apply_chat_template(messages, **options)
    if tokenizer.add_bos and ids[:1] != [tokenizer.bos_token_id]:
        ids = tokenizer.encode("", add_bos=True) + ids
    return ids
