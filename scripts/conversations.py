"""Conversations as tokenize.py reads them: a line of JSON is judged, a chat template turns it into text, and the parts that the assistant
says are told from the rest.

A template is that of a Hugging Face tokenizer (Jinja). If it marks the assistant's text by {% generation %}, that is what is learned. If
not, a turn of the assistant is what the template adds to the text that asks for this turn, so the marks that close it are learned too.
"""
import datetime
import json
import uuid

ROLES = ("system", "user", "assistant", "tool")
MARK = f"<{uuid.uuid4().hex}>"  # stands around marked text; no text holds it


class BadConversation(Exception):
    """Why a line cannot be learned from."""


def judged_message(place, message):
    if not isinstance(message, dict):
        raise BadConversation(f"{place} is no object")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise BadConversation(f"{place} has the role {role!r}, not one of {', '.join(ROLES)}")
    calls = role == "assistant" and message.get("tool_calls")
    if not isinstance(content, str) and not (calls and content is None):
        raise BadConversation(f"{place} has no text in 'content'")
    if role in ("user", "assistant") and not calls and not content.strip():
        raise BadConversation(f"{place}: the {role} says nothing")


def messages_of(record):
    """The messages of {"messages": [{"role", "content"}, ...]} or of {"prompt", "response"}."""
    if not isinstance(record, dict):
        raise BadConversation("no JSON object")
    if "messages" in record:
        messages = record["messages"]
    elif "prompt" in record or "response" in record:
        for key in ("prompt", "response"):
            if not isinstance(record.get(key), str):
                raise BadConversation(f"no text in {key!r}")
        messages = [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": record["response"]}]
    else:
        raise BadConversation("neither 'messages' nor 'prompt' and 'response'")
    if not isinstance(messages, list):
        raise BadConversation("'messages' is no list")
    for number, message in enumerate(messages, 1):
        judged_message(f"message {number}", message)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadConversation("no turn of the assistant: nothing to learn")
    return messages


def environment(marked):
    """What the templates of tokenizers expect of Jinja; marked is called where a template has a {% generation %}."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}

        def parse(self, parser):
            marked()
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("around"), [], [], body).set_lineno(line)

        def around(self, caller):
            return MARK + caller() + MARK

    def refuse(why):
        raise TemplateError(why)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"])
    made.filters["tojson"] = lambda value, **how: json.dumps(value, **{"ensure_ascii": False, **how})
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


class ChatTemplate:
    def __init__(self, source, special_tokens):
        self.has_marks = False
        self.special_tokens = special_tokens
        templates = environment(self.found_mark)
        try:
            self.template = templates.from_string(source)
        except Exception as wrong:  # whatever a wrong program does to Jinja
            raise BadConversation(f"no chat template that Jinja reads: {wrong}") from None

    def found_mark(self):
        self.has_marks = True

    def render(self, messages, tools, ask=False):
        try:
            text = self.template.render(messages=messages, tools=tools, add_generation_prompt=ask, **self.special_tokens)
            text.encode()
            return text
        except UnicodeEncodeError:
            raise BadConversation("half of a surrogate pair, which is no character") from None
        except Exception as wrong:  # a template is a program of its own
            raise BadConversation(f"the chat template: {wrong}") from None

    def parts(self, record):
        """[(text, learned)]: the conversation of a line, cut where the assistant begins and ends."""
        messages, tools = messages_of(record), record.get("tools")
        whole = self.render(messages, tools)
        if self.has_marks:
            parts = [(text, n % 2 == 1) for n, text in enumerate(whole.split(MARK))]
        else:
            parts = self.parts_by_turn(whole, messages, tools)
        if not any(text and learned for text, learned in parts):
            raise BadConversation("the chat template shows nothing of the assistant: nothing to learn")
        return [(text, learned) for text, learned in parts if text]

    def parts_by_turn(self, whole, messages, tools):
        parts, end = [], 0
        for n, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            asked, said = self.render(messages[:n], tools, ask=True), self.render(messages[: n + 1], tools)
            if not (said.startswith(asked) and whole.startswith(said) and len(asked) >= end):
                raise BadConversation(f"message {n + 1}: the chat template writes it otherwise when more follows; "
                                      "mark the assistant's text in it by {% generation %}")
            parts += [(whole[end : len(asked)], False), (whole[len(asked) : len(said)], True)]
            end = len(said)
        return parts + [(whole[end:], False)]
