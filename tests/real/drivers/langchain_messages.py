"""``langchain-anthropic`` in an agent of LangChain's: ``whole`` or ``stream``."""

import sys
from importlib.metadata import version
from typing import Any

from common import AGAIN, GREETING, SYSTEM, TASK, report
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from step import run


def run_step(step: str) -> str:
    """Run one step."""
    return run(step)


def main(how: str) -> None:
    """Greet, run the loop, and say one thing more."""
    thinking = {"type": "enabled", "budget_tokens": 1024}
    model: Any = ChatAnthropic(model="claude-sonnet-4-5", max_tokens=1536, thinking=thinking, streaming=how == "stream")
    agent = create_agent(model, tools=[run_step], system_prompt=SYSTEM)
    deltas = 0

    def ask(text: str, history: Any = ()) -> Any:
        nonlocal deltas
        given: Any = {"messages": [*history, {"role": "user", "content": text}]}
        options: Any = {"recursion_limit": 300}
        if how == "whole":
            return agent.invoke(given, options)["messages"]
        state: Any = None
        for mode, part in agent.stream(given, options, stream_mode=["messages", "values"]):
            deltas += mode == "messages"
            state = part if mode == "values" else state
        return state["messages"]

    greeting = ask(GREETING)[-1].text
    history = ask(TASK)
    again = ask(AGAIN, history)[-1].text
    report(greeting=greeting, said=history[-1].text, again=again, deltas=deltas, version=version("langchain-anthropic"))


main(sys.argv[1])
