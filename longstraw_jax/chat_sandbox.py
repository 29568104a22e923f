"""A jinja2 sandbox that also bounds memory and time.

jinja2's own sandbox keeps a template from Python's internals and caps `range`.
It lets pass `'x' * 10**10`, `s ~ s` in a loop, `'%999999999d' % 1` and loops in
loops. Here every rendering has a `Meter`, and

- loops, macros, comparisons, operators, calls and filters look at its deadline;
- strings and lists are paid for out of its budget, the large ones before they
  are made, and what is printed is paid for again;
- lists may not hold more than `MAX_ITEMS` values, counted through all levels;
- only the filters and methods that the tables below name can be called.

One operation on the largest permitted values is not interrupted, so a rendering
may overrun its deadline by the time of one such operation, about a second for
the default limits. Parsing is bounded by the length of the source alone.
"""

from collections.abc import Iterable, Iterator
import contextvars
import datetime
import functools
import json
import re
import time

import jinja2
from jinja2 import filters, nodes, runtime, utils
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.visitor import NodeTransformer

MAX_ITEMS = 1_000_000
MAX_BITS = 4096  # of an integer
MAX_WIDTH = 1000  # of indentation and format fields

_ITEM_COST = 16  # an element of a list in characters, by the memory it takes
_REPR_COST = 12  # characters that one may take inside a printed list
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


class LimitError(jinja2.TemplateRuntimeError):
  """A rendering would exceed its time or memory."""


class Meter:
  """What one rendering may still use."""

  def __init__(self, chars: int, seconds: float):
    """Starts the clock.

    Args:
      chars: characters that may be made, intermediate ones included.
      seconds: until the deadline.
    """
    self._left = self._chars = chars
    self._seconds = seconds
    self._deadline = time.monotonic() + seconds

  def tick(self) -> bool:
    """Refuses to go on behind the deadline; True, for use in conditions."""
    if time.monotonic() > self._deadline:
      raise LimitError(f"it takes longer than {self._seconds:g} seconds")
    return True

  def require(self, chars: int) -> None:
    """Refuses what there is no room for."""
    if chars > self._left:
      raise LimitError(f"it makes more than {self._chars} characters")

  def charge(self, chars: int) -> None:
    """Pays."""
    self.require(chars)
    self._left -= chars


METER: contextvars.ContextVar[Meter] = contextvars.ContextVar("METER")


def size_of(value, *, printable: bool = False) -> int:
  """Counts the characters and elements of a value, shared parts each time.

  Args:
    value: anything; only text, lists, tuples and dicts have parts.
    printable: whether to refuse what has no plain text, such as a namespace.

  Returns:
    Characters, and `_ITEM_COST` for every element.

  Raises:
    LimitError: if there are more than `MAX_ITEMS` elements.
    TypeError: if the value should be printable and is not.
  """
  chars = items = 0
  stack = [value]
  while stack:
    item = stack.pop()
    if isinstance(item, str):
      chars += len(item)
    elif isinstance(item, (list, tuple, dict)):
      items += len(item)
      if items > MAX_ITEMS:
        raise LimitError(f"it makes a list of more than {MAX_ITEMS} values")
      stack.extend(item)
      if isinstance(item, dict):
        stack.extend(item.values())
    elif printable and not isinstance(
      item, (int, float, type(None), jinja2.Undefined)
    ):
      raise TypeError(f"a {type(item).__name__} cannot be printed")
  return chars + _ITEM_COST * items


def charged(value):
  """Pays for a new value; returns it."""
  METER.get().tick()
  if isinstance(value, str):
    METER.get().charge(len(value))
  elif isinstance(value, (list, tuple, dict)):
    size_of(value)  # its parts are paid for, but must not multiply
    METER.get().charge(_ITEM_COST * len(value))
  elif isinstance(value, int) and value.bit_length() > MAX_BITS:
    raise LimitError(f"it makes an integer of more than {MAX_BITS} bits")
  return value


def to_text(value) -> str:
  """What `{{ value }}` prints."""
  if isinstance(value, str):
    return value
  METER.get().require(_REPR_COST * size_of(value, printable=True))
  return str(value)


def _check_format(form: str) -> None:
  """Refuses the widths that a format could ask for."""
  if "*" in form or re.search(rf"\d{{{len(str(MAX_WIDTH))},}}", form):
    raise LimitError(f"it formats to a width of {MAX_WIDTH} or more")


def _check_operation(operator: str, left, right) -> None:
  if operator == "%" and isinstance(left, str):
    _check_format(left)
    field = 2 * MAX_WIDTH + _REPR_COST * size_of(right, printable=True)
    METER.get().require(len(left) + left.count("%") * field)
  elif operator == "*":
    for value, times in ((left, right), (right, left)):
      if isinstance(value, (str, list, tuple)) and isinstance(times, int):
        METER.get().require(max(len(value), 1) * times)
    if isinstance(left, int) and isinstance(right, int):
      _check_bits(left.bit_length() + right.bit_length())
  elif operator == "**" and isinstance(left, int) and isinstance(right, int):
    _check_bits(left.bit_length() * max(right, 0))


def _check_bits(bits: int) -> None:
  if bits > MAX_BITS:
    raise LimitError(f"it makes an integer of more than {MAX_BITS} bits")


def _check_items(count: int) -> None:
  if count > MAX_ITEMS:
    raise LimitError(f"it makes a list of more than {MAX_ITEMS} values")


# Methods of strings.


def _split(method: str, text: str, sep=None, maxsplit=-1) -> list[str]:
  METER.get().charge(len(text))
  most = MAX_ITEMS if maxsplit < 0 else min(maxsplit, MAX_ITEMS)
  pieces = getattr(text, method)(sep, most)
  if most != maxsplit:
    _check_items(len(pieces))
  return pieces


def _splitlines(text: str, keepends=False) -> list[str]:
  METER.get().charge(len(text))
  _check_items(sum(text.count(end) for end in _LINE_ENDS))
  return text.splitlines(keepends)


def _partition(method: str, text: str, sep) -> tuple[str, ...]:
  METER.get().charge(len(text))
  return getattr(text, method)(sep)


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
  text, old, new = to_text(text), to_text(old), to_text(new)
  count = -1 if count is None else count
  times = text.count(old) if count < 0 else min(text.count(old), count)
  METER.get().require(len(text) + times * max(len(new) - len(old), 0))
  return text.replace(old, new, count)


def _join(separator: str, values: Iterable) -> str:
  texts = []
  length = 0
  for value in _ticking(values):
    texts.append(to_text(value))
    length += len(texts[-1]) + len(separator)
    METER.get().require(length + _ITEM_COST * len(texts))
  return separator.join(texts)


# Their results are at most three times as long as the text.
_SHORT_METHODS = (
  "capitalize casefold count endswith find index isalnum isalpha isascii "
  "isdecimal isdigit isidentifier islower isnumeric isprintable isspace "
  "istitle isupper lower lstrip removeprefix removesuffix rfind rindex rstrip "
  "startswith strip swapcase title upper"
).split()
_STR_METHODS = {name: getattr(str, name) for name in _SHORT_METHODS} | {
  "split": functools.partial(_split, "split"),
  "rsplit": functools.partial(_split, "rsplit"),
  "splitlines": _splitlines,
  "partition": functools.partial(_partition, "partition"),
  "rpartition": functools.partial(_partition, "rpartition"),
  "replace": _replace,
  "join": _join,
}
_METHODS = {
  str: _STR_METHODS,
  dict: {name: getattr(dict, name) for name in "get items keys values".split()},
  list: {name: getattr(list, name) for name in "count index".split()},
  tuple: {name: getattr(tuple, name) for name in "count index".split()},
}


# Filters.


def _ticking(values: Iterable) -> Iterator:
  for value in values:
    METER.get().tick()
    yield value


def _taken(values: Iterable) -> list:
  taken = []
  for value in _ticking(values):
    taken.append(value)
    _check_items(len(taken))
  return charged(taken)


def _same(value):
  return value


def _limited(function, prepare=_same):
  """A filter whose first argument is prepared and whose result is paid for."""
  place = int(hasattr(function, "jinja_pass_arg"))

  @functools.wraps(function)
  def limited(*args, **kwargs):
    METER.get().tick()
    prepared = prepare(args[place])
    return charged(
      function(*args[:place], prepared, *args[place + 1 :], **kwargs)
    )

  return limited


@jinja2.pass_environment
def _join_filter(environment, value, d="", attribute=None):
  if attribute is not None:
    value = map(filters.make_attrgetter(environment, attribute), value)
  return _join(to_text(d), value)


@jinja2.pass_environment
def _sum(environment, value, attribute=None, start=0):
  if attribute is not None:
    value = map(filters.make_attrgetter(environment, attribute), value)
  for number in _ticking(value):
    if not isinstance(number, (int, float)):
      raise TypeError(f"sum of a {type(number).__name__}")
    start = start + number
  return start


def _round(value, precision=0, method="common"):
  if abs(precision) > 100:
    raise LimitError(f"it rounds to {precision} digits")
  return filters.do_round(value, precision, method)


def _check_width(width) -> None:
  if (len(width) if isinstance(width, str) else width or 0) > MAX_WIDTH:
    raise LimitError(f"it indents by more than {MAX_WIDTH}")


def _indent(text, width=4, first=False, blank=False):
  _check_width(width)
  lines = 1 + sum(text.count(end) for end in _LINE_ENDS)
  step = len(width) if isinstance(width, str) else width
  METER.get().require(len(text) + lines * (step + 1))
  return filters.do_indent(text, width, first, blank)


def _title(text):
  _check_items(len(text))  # the filter splits into words
  return filters.do_title(text)


def _tojson(
  value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  """As in transformers: plain JSON, without the HTML escapes of jinja2's."""
  _check_width(indent)
  pieces = []
  length = 0
  encoder = json.JSONEncoder(
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
  for piece in _ticking(encoder.iterencode(value)):
    pieces.append(piece)
    length += len(piece)
    METER.get().require(length + _ITEM_COST * len(pieces))
  return "".join(pieces)


def _filters() -> dict:
  theirs = filters.FILTERS
  plain = "abs d default dictsort first float int items last length count"
  lazy = "map reject rejectattr select selectattr unique min max"
  text = "capitalize lower trim upper"
  table = {name: _limited(theirs[name]) for name in plain.split()}
  table |= {name: _limited(theirs[name], _ticking) for name in lazy.split()}
  table |= {name: _limited(theirs[name], to_text) for name in text.split()}
  return table | {
    "indent": _limited(_indent, to_text),
    "join": _limited(_join_filter),
    "list": _limited(_same, _taken),
    "replace": _limited(_replace),
    "reverse": _limited(filters.do_reverse),
    "round": _limited(_round),
    "safe": _limited(to_text),  # nothing is escaped here
    "sort": _limited(filters.do_sort, _taken),
    "string": _limited(to_text),
    "sum": _limited(_sum),
    "title": _limited(_title, to_text),
    "tojson": _limited(_tojson),
  }


# Functions.


class Refusal(jinja2.TemplateError):
  """A template called raise_exception: it does not take these messages."""


def _raise_exception(message):
  raise Refusal(to_text(message))


def _strftime_now(form):
  form = to_text(form)
  _check_format(form)
  METER.get().require(MAX_WIDTH * len(form))
  return datetime.datetime.now().strftime(form)


def _tick() -> bool:
  return METER.get().tick()


def _concatenate(*values) -> str:
  """The operator `~`."""
  return charged(_join("", values))


class _Guard(NodeTransformer):
  """Puts calls to the meter into a parsed template."""

  def visit_For(self, node):
    self.generic_visit(node)
    if node.test is not None:
      node.test = nodes.And(_call(node, "tick"), node.test, lineno=node.lineno)
    return self._body(node)

  def _body(self, node):
    tick = nodes.ExprStmt(_call(node, "tick"), lineno=node.lineno)
    node.body.insert(0, tick)
    return node

  def _with_body(self, node):
    return self._body(self.generic_visit(node))

  visit_Macro = visit_CallBlock = visit_Block = _with_body

  def visit_TemplateData(self, node):
    # Constants are printed, and so paid for, like any other value.
    return nodes.Const(node.data, lineno=node.lineno)

  def visit_Concat(self, node):
    self.generic_visit(node)
    return _call(node, "concatenate", *node.nodes)

  def _paid(self, node):
    return _call(node, "charged", self.generic_visit(node))

  visit_List = visit_Dict = visit_Compare = visit_Test = _paid

  def visit_Tuple(self, node):
    return self._paid(node) if node.ctx == "load" else node

  def visit_Getitem(self, node):
    if isinstance(node.arg, nodes.Slice):
      return self._paid(node)
    return self.generic_visit(node)

  def _refuse(self, node):
    raise jinja2.TemplateSyntaxError(
      f"{type(node).__name__} is not for chat templates", node.lineno
    )

  visit_Include = visit_Import = visit_FromImport = visit_Extends = _refuse
  visit_EvalContextModifier = visit_ScopedEvalContextModifier = _refuse


def _call(node, name: str, *args):
  callee = nodes.EnvironmentAttribute(name, lineno=node.lineno)
  return nodes.Call(callee, list(args), [], None, None, lineno=node.lineno)


class _Generation(Extension):
  """`{% generation %}` marks what to train on; here it is printed as it is."""

  tags = {"generation"}

  def parse(self, parser):
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class MeteredEnvironment(ImmutableSandboxedEnvironment):
  """Compiles chat templates; to render one, set `METER` first."""

  intercepted_binops = frozenset(["+", "*", "**", "%"])

  def __init__(self):
    """Makes the environment that the transformers library gives templates."""
    super().__init__(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=["jinja2.ext.loopcontrols", _Generation],
      finalize=_finalize,
      optimized=False,  # constants are folded without a meter
    )
    self.filters = _filters()
    own = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    self.globals |= own
    del self.globals["lipsum"]

  tick = staticmethod(_tick)
  charged = staticmethod(charged)
  concatenate = staticmethod(_concatenate)

  def guarded(self, source: str) -> jinja2.Template:
    """Compiles a template.

    Args:
      source: its text.

    Returns:
      The template.

    Raises:
      jinja2.TemplateError: or another error, if it cannot be compiled.
    """
    tree = _Guard().visit(self.parse(source))
    return self.from_string(tree.set_environment(self))

  def call_binop(self, context, operator, left, right):
    """Checks an operation, then pays for its result."""
    _check_operation(operator, left, right)
    return charged(super().call_binop(context, operator, left, right))

  def unsafe_undefined(self, obj, attribute):
    """Refuses at once what jinja2 would let pass until it is used."""
    raise SecurityError(f"it takes {attribute!r} of a {type(obj).__name__}")

  # The names keep clear of the keyword arguments of the call.
  def call(__self, __context, __obj, *args, **kwargs):  # noqa: B902, N805
    """Calls what the tables allow, and pays for the result."""
    METER.get().tick()
    owner = getattr(__obj, "__self__", None)
    if type(owner) in _METHODS:
      method = _METHODS[type(owner)].get(__obj.__name__)
      if method is not None:
        kwargs.pop("_loop_vars", None)  # jinja2's scopes, meant for macros
        kwargs.pop("_block_vars", None)
        return charged(method(owner, *args, **kwargs))
    if any(__obj is own for own in (_tick, charged, _concatenate)):
      return __obj(*args)  # without the scopes that jinja2 adds in loops
    if not (
      isinstance(__obj, _CALLABLE)
      or isinstance(owner, _OWNERS)
      or any(__obj is known for known in __self.globals.values())
    ):
      name = getattr(__obj, "__name__", type(__obj).__name__)
      raise SecurityError(f"it calls {name!r}")
    return charged(super().call(__context, __obj, *args, **kwargs))


_CALLABLE = (
  jinja2.Undefined,  # which says what is missing
  runtime.BlockReference,
  runtime.LoopContext,
  runtime.Macro,
  utils.Joiner,
)
_OWNERS = (runtime.LoopContext, utils.Cycler)


@jinja2.pass_context
def _finalize(context, value) -> str:
  METER.get().tick()
  text = to_text(value)
  METER.get().charge(len(text))
  return text
