"""The chat grammar as a Jinja template, for programs that render prompts from text.

Renders what tidemill.model.chat.codec renders, with one limit that lies in templates: text and markers become one
string, so a message that spells a marker is read as that marker. Where prompts come from strangers, use the codec.
Variables: messages, tools, add_generation_prompt; enable_thinking (default true), reasoning_effort, tool_choice.
"""

from __future__ import annotations

import json

from tidemill.model.chat.texts import EFFORTS, OWN_TEXTS, InstructionTexts

_GRAMMAR = r"""
{%- macro attribute(name, value) -%}
{{ ' ' ~ name ~ '="' ~ (value | string | replace('&', '&amp;') | replace('"', '&quot;')) ~ '"' }}
{%- endmacro -%}
{%- macro opening(tag, attributes='') -%}
{{ '<|open|>' ~ tag ~ attributes ~ '<|sep|>' }}
{%- endmacro -%}
{%- macro closing(tag) -%}
{{ '<|close|>' ~ tag ~ '<|sep|>' }}
{%- endmacro -%}
{%- macro element(tag, body, attributes='') -%}
{{ opening(tag, attributes) ~ body ~ closing(tag) }}
{%- endmacro -%}
{%- macro whole(attributes, body) -%}
{{ element('message', body, attributes) ~ '<|end_of_msg|>' }}
{%- endmacro -%}
{%- macro note(kind, body) -%}
{{ whole(attribute('role', 'system') ~ attribute('type', kind), body) }}
{%- endmacro -%}
{%- macro canonical(value) -%}
{%- if value is mapping -%}
{{ '{' }}
{%- for key, item in value | dictsort(true) -%}
{{ (key | tojson(ensure_ascii=false)) ~ ':' ~ canonical(item) ~ ('' if loop.last else ',') }}
{%- endfor -%}
{{ '}' }}
{%- elif value is iterable and value is not string -%}
{{ '[' }}
{%- for item in value -%}
{{ canonical(item) ~ ('' if loop.last else ',') }}
{%- endfor -%}
{{ ']' }}
{%- else -%}
{{ value | tojson(ensure_ascii=false) }}
{%- endif -%}
{%- endmacro -%}
{%- macro declare(before, listed) -%}
{{ note('tool-declare', before ~ canonical(listed) ~ '\n```') }}
{%- endmacro -%}
{%- macro text_of(content) -%}
{%- if content is string -%}
{{ content }}
{%- elif content is iterable -%}
{%- for part in content -%}
{{ part.text if part.type == 'text' else raise_exception('this model reads text only') }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- macro kind_of(value) -%}
{{ 'null' if value is none else 'boolean' if value is boolean else 'number' if value is number else
   'string' if value is string else 'object' if value is mapping else 'array' }}
{%- endmacro -%}
{%- macro argument(key, value) -%}
{{ element('argument', value if value is string else value | tojson(ensure_ascii=false),
           attribute('key', key) ~ attribute('type', kind_of(value))) }}
{%- endmacro -%}
{%- macro call(function, index) -%}
{{ opening('call', attribute('tool', function.name) ~ attribute('index', index)) }}
{%- if function.arguments is mapping -%}
{%- for key, value in function.arguments.items() -%}
{{ argument(key, value) }}
{%- endfor -%}
{%- elif function.arguments -%}
{{ element('json', function.arguments, attribute('type', 'object')) }}
{%- endif -%}
{{ closing('call') }}
{%- endmacro -%}
{%- macro assistant(message, thinking) -%}
{%- if thinking -%}
{%- set reasoning = message.reasoning_content or message.reasoning or '' -%}
{{ element('think', reasoning if reasoning | trim else '') }}
{%- endif -%}
{{ element('response', text_of(message.content)) }}
{%- if message.tool_calls -%}
{{ opening('tools') }}
{%- for item in message.tool_calls -%}
{{ call(item.function, loop.index) }}
{%- endfor -%}
{{ closing('tools') }}
{%- endif -%}
{%- endmacro -%}
{%- macro result(message, tool, index) -%}
{{ whole(attribute('role', 'tool') ~ attribute('tool', tool or raise_exception('a tool result names no tool'))
         ~ attribute('index', index), text_of(message.content)) }}
{%- endmacro -%}
{%- macro results(run, calls) -%}
{%- set known = namespace(matched=0, index=0) -%}
{%- for message in run -%}
{%- for item in calls if message.tool_call_id and item.id == message.tool_call_id -%}
{%- set known.matched = known.matched + (1 if loop.first else 0) -%}
{%- endfor -%}
{%- endfor -%}
{%- if known.matched == run | length -%}
{%- for item in calls -%}
{%- for message in run if message.tool_call_id == item.id -%}
{%- set known.index = known.index + 1 -%}
{{ result(message, item.function.name, known.index) }}
{%- endfor -%}
{%- endfor -%}
{%- else -%}
{%- for message in run -%}
{{ result(message, message.name, loop.index) }}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""

_CONVERSATION = r"""
{%- set thinking = enable_thinking if enable_thinking is defined else true -%}
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort else default_effort -%}
{%- if tools is defined and tools -%}
{{ declare(static_tools, tools) }}
{%- endif -%}
{%- if thinking and effort in efforts -%}
{{ note('thinking-effort', efforts[effort]) }}
{%- endif -%}
{%- set state = namespace(calls=[], run=[]) -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- set state.run = state.run + [message] -%}
{%- if loop.last or messages[loop.index].role != 'tool' -%}
{{ results(state.run, state.calls) }}
{%- set state.run = [] -%}
{%- endif -%}
{%- else -%}
{%- set named = attribute('name', message.name) if message.name else '' -%}
{%- set state.calls = message.tool_calls or [] if message.role == 'assistant' else [] -%}
{%- if message.role == 'assistant' -%}
{{ whole(attribute('role', 'assistant') ~ named, assistant(message, thinking)) }}
{%- elif message.tools -%}
{{ declare(dynamic_tools, message.tools) }}
{%- else -%}
{{ whole(attribute('role', 'system' if message.role == 'developer' else message.role) ~ named,
         text_of(message.content)) }}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if tool_choice is defined and tool_choice == 'required' -%}
{{ note('tool-choice', choice_required) }}
{%- elif tool_choice is defined and tool_choice == 'none' -%}
{{ note('tool-choice', choice_none) }}
{%- endif -%}
{%- if add_generation_prompt -%}
{{ opening('message', attribute('role', 'assistant')) ~ opening('think' if thinking else 'response') }}
{%- endif -%}
"""


def chat_template(texts: InstructionTexts = OWN_TEXTS) -> str:
    """The template with these instruction texts written into it."""
    values = {
        "efforts": {effort: texts.effort[effort] for effort in EFFORTS if effort in texts.effort},
        "default_effort": texts.default_effort, "static_tools": texts.static_tools,
        "dynamic_tools": texts.dynamic_tools, "choice_required": texts.choice_required,
        "choice_none": texts.choice_none,
    }
    constants = "".join("{%- set " + f"{name} = {json.dumps(value, ensure_ascii=False)}" + " -%}\n"
                        for name, value in values.items())
    return constants + _GRAMMAR.strip() + "\n" + _CONVERSATION.strip()
