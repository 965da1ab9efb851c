r"""Turn the TeX of pages and docstrings into MathML, which browsers draw without any script.

The Markdown extension `arithmatex` marks formulas; this hook replaces them in the finished HTML. It knows the TeX that
the pages use, no more: an unknown command stops the build and names itself, and is added to a table below.
"""

from __future__ import annotations

import html as entities
import re

from mkdocs.exceptions import PluginError

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
BLOCK = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)
TOKEN = re.compile(r"\\(?:mathrm|mathbb|text)\{[^{}]*\}|\\(?:begin|end)\{\w+\}|\\[A-Za-z]+|\\.|\d+(?:\.\d+)?|\S")

LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "theta": "θ", "pi": "π", "sigma": "σ",
    "tau": "τ", "infty": "∞", "dots": "…", "cdots": "⋯", "partial": "∂", "top": "⊤",
    "Pi": "Π", "nabla": "∇", "varepsilon": "ε", "lambda": "λ", "eta": "η", "Delta": "Δ", "ell": "ℓ",
}  # fmt: skip
OPERATORS = {
    "le": "≤", "ge": "≥", "ne": "≠", "in": "∈", "subset": "⊂", "supset": "⊃", "cap": "∩", "to": "→", "leftarrow": "←",
    "mapsto": "↦", "sim": "∼", "approx": "≈", "cdot": "·", "times": "×", "odot": "⊙", "circ": "∘", "pm": "±", "sum": "∑",
    "|": "‖", "lVert": "‖", "rVert": "‖", "lvert": "|", "rvert": "|", "lceil": "⌈", "rceil": "⌉", "lfloor": "⌊", "rfloor": "⌋",
    "{": "{", "}": "}",
}  # fmt: skip
DOUBLE = {"R": "ℝ"}
NAMES = ("max", "min", "sup", "log", "exp", "cos", "sin", "tanh", "det", "diag")
BELOW = {"∑", "max", "min", "sup"}  # in a displayed formula their subscripts stand below
IGNORED = ("big", "left", "right")
SPACES = {",": "0.17em", ";": "0.28em", "quad": "1em", "qquad": "2em", " ": "0.28em"}
ACCENTS = {"hat": "^", "bar": "¯", "dot": "˙"}


def on_page_content(html: str, **_: object) -> str:
    """MkDocs calls this with the body of every page."""
    html = BLOCK.sub(lambda match: to_mathml(entities.unescape(match[1]), display=True), html)
    return INLINE.sub(lambda match: to_mathml(entities.unescape(match[1])), html)


def to_mathml(tex: str, *, display: bool = False) -> str:
    r"""One formula.

    Example:
        >>> to_mathml(r"\sqrt{x_1}")
        '<math><msqrt><msub><mi>x</mi><mn>1</mn></msub></msqrt></math>'
    """
    parser = Parser(tex, display)
    body = parser.row()
    if parser.tokens:
        raise PluginError(f"unbalanced TeX: {tex}")
    return f'<math display="block">{body}</math>' if display else f"<math>{body}</math>"


class Parser:
    """Recursive descent over the tokens of one formula."""

    def __init__(self, tex: str, display: bool) -> None:
        self.tex, self.display = tex, display
        self.tokens = TOKEN.findall(tex)[::-1]

    def row(self, *stops: str) -> str:
        """Everything up to one of the stop tokens, which stays."""
        parts = []
        while self.tokens and self.tokens[-1] not in (*stops, "}"):
            parts.append(self.scripted())
        return parts[0] if len(parts) == 1 else f"<mrow>{''.join(parts)}</mrow>"

    def scripted(self) -> str:
        """An atom with its sub- and superscripts."""
        base, below, above = self.atom(), "", ""
        while self.tokens and self.tokens[-1] in ("_", "^", "'"):
            mark = self.tokens.pop()
            if mark == "_":
                below = self.atom()
            else:
                above += "<mo>′</mo>" if mark == "'" else self.atom()
        if above.count("<mo>") and not above.startswith("<mrow>"):
            above = f"<mrow>{above}</mrow>"
        under = self.display and re.sub("<.*?>", "", base) in BELOW
        tag = ("munder", "mover", "munderover") if under else ("msub", "msup", "msubsup")
        if not (below or above):
            return base
        name = tag[2] if below and above else tag[0] if below else tag[1]
        return f"<{name}>{base}{below}{above}</{name}>"

    def atom(self) -> str:
        """One token or one group."""
        if not self.tokens:
            raise PluginError(f"TeX ends too early: {self.tex}")
        token = self.tokens.pop()
        if token == "{":
            inner = self.row()
            self.expect("}")
            return inner
        if token.startswith("\\"):
            return self.command(token[1:])
        text = entities.escape({"-": "−", "*": "∗"}.get(token, token))
        if token[0].isdigit():
            return f"<mn>{text}</mn>"
        if token.isalpha():
            return f"<mi>{text}</mi>"
        return f'<mo stretchy="false">{text}</mo>' if token in "|()[]" else f"<mo>{text}</mo>"

    def command(self, name: str) -> str:
        """What follows a backslash."""
        if name.endswith("}") and name != "}" and not name.startswith(("begin", "end")):
            kind, text = name[:-1].split("{")
            if kind == "text":
                return f"<mtext>{entities.escape(text)}</mtext>"
            return f'<mi mathvariant="normal">{DOUBLE[text] if kind == "mathbb" else text}</mi>'
        if name == "begin{pmatrix}":
            return self.matrix()
        if name in ("frac", "tfrac"):
            return f"<mfrac>{self.atom()}{self.atom()}</mfrac>"
        if name == "sqrt":
            return f"<msqrt>{self.atom()}</msqrt>"
        if name in ACCENTS:
            return f'<mover accent="true">{self.atom()}<mo>{ACCENTS[name]}</mo></mover>'
        if name in IGNORED:
            return ""
        if name in SPACES:
            return f'<mspace width="{SPACES[name]}"/>'
        if name in NAMES:
            return f'<mi mathvariant="normal">{name}</mi>'
        if name in LETTERS:
            return f"<mi>{LETTERS[name]}</mi>"
        if name in OPERATORS:
            fixed = ' stretchy="false"' if OPERATORS[name] in "‖|⌈⌉{}" else ""
            return f"<mo{fixed}>{OPERATORS[name]}</mo>"
        raise PluginError(f"docs/hooks/mathml.py does not know \\{name}, used in: {self.tex}")

    def matrix(self) -> str:
        """The inside of a pmatrix."""
        end, rows, cells = "\\end{pmatrix}", [], []
        while True:
            cells.append(f"<mtd>{self.row('&', chr(92) * 2, end)}</mtd>")
            mark = self.tokens.pop() if self.tokens else ""
            if mark != "&":
                rows.append(f"<mtr>{''.join(cells)}</mtr>")
                cells = []
            if mark == end:
                return f"<mrow><mo>(</mo><mtable>{''.join(rows)}</mtable><mo>)</mo></mrow>"
            if mark not in ("&", "\\\\"):
                raise PluginError(f"unfinished matrix: {self.tex}")

    def expect(self, token: str) -> None:
        """Take this token or complain."""
        if not self.tokens or self.tokens.pop() != token:
            raise PluginError(f"expected {token} in: {self.tex}")
