//! A template's source, split into code, quoted strings and plain output: enough to mark the control tokens that it
//! spells.

use aho_corasick::AhoCorasick;
use std::borrow::Cow;

use crate::TextError;
use crate::tokenizer::control::{Controls, finder};

/// Longest accepted template, in bytes; known ones stay under 30 KB.
const TEMPLATE_BYTES_MAX: usize = 1 << 20;
/// Most different string literals; known templates have at most 150. Each is compared with each control token.
const LITERALS_MAX: usize = 1 << 12;

/// The pieces of a template; concatenated they are its source.
#[derive(Debug)]
pub(super) struct Source {
    text: String,
    pieces: Vec<(Piece, std::ops::Range<usize>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    /// Output outside of tags.
    Plain,
    /// Inside a string literal, without its quotes.
    Quoted,
    /// Anything else: expressions, statements, comments, delimiters.
    Code,
}

impl Source {
    pub(super) fn new(template: &str) -> Result<Self, TextError> {
        if template.len() > TEMPLATE_BYTES_MAX {
            return Err(TextError::TemplateSyntax(format!(
                "{} bytes, over the limit of {TEMPLATE_BYTES_MAX}",
                template.len()
            )));
        }
        let text = without_generation_marks(template);
        let pieces = Cutter { text: &text, at: 0, pieces: Vec::new() }.run();
        Ok(Self { text, pieces })
    }

    pub(super) fn text(&self) -> &str {
        &self.text
    }

    /// Whether the template contains exactly this string literal.
    pub(super) fn quotes(&self, literal: &str) -> bool {
        self.quoted().any(|q| q == literal)
    }

    fn quoted(&self) -> impl Iterator<Item = &str> {
        self.pieces.iter().filter(|(kind, _)| *kind == Piece::Quoted).map(|(_, range)| &self.text[range.clone()])
    }

    /// The source with `change` applied to all text that it can output.
    pub(super) fn map_output(&self, change: impl Fn(&str) -> String) -> String {
        let piece = |(kind, range): &(Piece, std::ops::Range<usize>)| match &self.text[range.clone()] {
            code if *kind == Piece::Code => Cow::Borrowed(code),
            output => Cow::Owned(change(output)),
        };
        self.pieces.iter().map(piece).collect()
    }

    /// Finds string literals that content may be compared with, and that no control token can overlap: no control token
    /// begins at their end, ends at their beginning, contains them or is contained in them.
    pub(super) fn comparable(&self, controls: &Controls) -> Result<AhoCorasick, TextError> {
        let apart = self.apart(controls)?;
        finder("string literals", apart.iter().map(|literal| &**literal))
    }

    fn apart(&self, controls: &Controls) -> Result<Vec<Cow<'_, str>>, TextError> {
        let borders =
            |left: &str, right: &str| right.char_indices().any(|(at, c)| left.ends_with(&right[..at + c.len_utf8()]));
        let touches = |literal: &str, control: &str| {
            literal.contains(control)
                || control.contains(literal)
                || borders(literal, control)
                || borders(control, literal)
        };
        let apart = |q: &str| !q.is_empty() && !controls.tokens().iter().any(|(_, control)| touches(q, control));
        let mut found: Vec<Cow<'_, str>> = self.quoted().map(unescape).collect();
        found.sort_unstable();
        found.dedup();
        if found.len() > LITERALS_MAX {
            return Err(TextError::TemplateSyntax(format!(
                "{} different string literals, over the limit of {LITERALS_MAX}",
                found.len()
            )));
        }
        found.retain(|q| apart(q));
        Ok(found)
    }
}

/// Line ends and tabs: the escapes that occur in the literals that templates search for.
fn unescape(literal: &str) -> Cow<'_, str> {
    match literal.contains('\\') {
        true => literal.replace("\\n", "\n").replace("\\t", "\t").into(),
        false => literal.into(),
    }
}

/// Removes `{% generation %}` and `{% endgeneration %}`, which mark answers for training and print nothing. They become
/// statements with the same white space control.
fn without_generation_marks(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let name = tag[..end].trim_start_matches("{%").trim_end_matches("%}").trim_matches(['-', '+']).trim();
        match name {
            "generation" => out.push_str(&tag[..end].replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag[..end].replace("endgeneration", "endif")),
            _ => {
                out.push_str("{%");
                rest = &tag[2..];
                continue;
            }
        }
        rest = &tag[end..];
    }
    out + rest
}

struct Cutter<'a> {
    text: &'a str,
    at: usize,
    pieces: Vec<(Piece, std::ops::Range<usize>)>,
}

impl Cutter<'_> {
    fn run(mut self) -> Vec<(Piece, std::ops::Range<usize>)> {
        while self.at < self.text.len() {
            let next = self.text[self.at..].match_indices('{').map(|(i, _)| self.at + i);
            let open = next.into_iter().find(|&i| matches!(self.text.as_bytes().get(i + 1), Some(b'{' | b'%' | b'#')));
            self.take(Piece::Plain, open.unwrap_or(self.text.len()));
            match self.text.as_bytes().get(self.at + 1) {
                Some(b'#') => self.take_through(Piece::Code, "#}"),
                Some(b'%') if self.is_raw() => {
                    self.take_through(Piece::Code, "%}");
                    let end = self.text[self.at..].match_indices("{%").map(|(i, _)| self.at + i);
                    let end = end
                        .into_iter()
                        .find(|&i| self.text[i + 2..].trim_start_matches(['-', '+', ' ']).starts_with("endraw"));
                    self.take(Piece::Plain, end.unwrap_or(self.text.len()));
                    self.take_through(Piece::Code, "%}");
                }
                Some(_) => self.code(),
                None => {}
            }
        }
        self.pieces
    }

    fn is_raw(&self) -> bool {
        let name = self.text[self.at + 2..].trim_start_matches(['-', '+', ' ']);
        name.strip_prefix("raw").is_some_and(|rest| rest.trim_start_matches([' ', '-', '+']).starts_with("%}"))
    }

    /// An expression or a statement, up to its end outside of strings and braces.
    fn code(&mut self) {
        let bytes = self.text.as_bytes();
        let close = if bytes[self.at + 1] == b'{' { b"}}" } else { b"%}" };
        let (mut i, mut depth) = (self.at + 2, 0usize);
        while i < bytes.len() {
            match bytes[i] {
                quote @ (b'"' | b'\'') => {
                    self.take(Piece::Code, i + 1);
                    i = self.at;
                    while i < bytes.len() && bytes[i] != quote {
                        i += 1 + usize::from(bytes[i] == b'\\');
                    }
                    self.take(Piece::Quoted, i.min(bytes.len()));
                }
                _ if depth == 0 && bytes[i..].starts_with(close) => return self.take(Piece::Code, i + 2),
                b'{' => depth += 1,
                b'}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            i += 1;
        }
        self.take(Piece::Code, bytes.len());
    }

    fn take_through(&mut self, kind: Piece, end: &str) {
        let stop = self.text[self.at..].find(end).map_or(self.text.len(), |i| self.at + i + end.len());
        self.take(kind, stop);
    }

    fn take(&mut self, kind: Piece, end: usize) {
        if end > self.at {
            self.pieces.push((kind, self.at..end));
            self.at = end;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cut(template: &str) -> String {
        let source = Source::new(template).unwrap();
        let show = |(kind, range): &(Piece, std::ops::Range<usize>)| {
            let text = &source.text[range.clone()];
            match kind {
                Piece::Plain => format!("P({text})"),
                Piece::Quoted => format!("Q({text})"),
                Piece::Code => text.to_owned(),
            }
        };
        source.pieces.iter().map(show).collect()
    }

    #[test]
    fn cuts_templates() {
        let cases = [
            ("a{{ 'b' + \"c\" }}d", "P(a){{ 'Q(b)' + \"Q(c)\" }}P(d)"),
            ("{{ {'k': {'n': '}}'}} }}x", "{{ {'Q(k)': {'Q(n)': 'Q(}})'}} }}P(x)"),
            ("{# don't #}{%- if x == 'it\\'s' %}{y", "{# don't #}{%- if x == 'Q(it\\'s)' %}P({y)"),
            ("{% raw %}{{ 'x' }}{%- endraw %}z", "{% raw %}P({{ 'x' }}){%- endraw %}P(z)"),
            ("{% raw -%}{{ 'x' }}{% endraw %}z", "{% raw -%}P({{ 'x' }}){% endraw %}P(z)"),
            ("{%- generation -%}a{% endgeneration %}", "{%- if true -%}P(a){% endif %}"),
        ];
        for (template, expected) in cases {
            assert_eq!(cut(template), expected);
        }
    }

    #[test]
    fn comparable_literals_touch_no_control_token() {
        let controls = Controls::new(vec![(0, "<|a|>".to_owned()), (1, "<x>".to_owned())]).unwrap();
        let source =
            Source::new("{{ '<|' ~ '|>' ~ '</think>' ~ 'x' ~ '[INST]' ~ '>a' ~ 'a<' ~ '\\n\\n' ~ 'role' ~ '' }}")
                .unwrap();
        assert_eq!(source.apart(&controls).unwrap(), ["\n\n", "</think>", "[INST]", "role"]);
    }

    #[test]
    fn each_literal_is_compared_once() {
        let tokens = |count: u32| (0..count).map(|id| (id, format!("<|{id}|>"))).collect();
        let source = |count: usize, different: usize| {
            let literals: String = (0..count).map(|n| format!("'q{}'~", n % different)).collect();
            Source::new(&format!("{{{{ {literals}'x' }}}}")).unwrap()
        };
        let begin = std::time::Instant::now();
        let all = source(100_000, 2).comparable(&Controls::new(tokens(16_384)).unwrap()).unwrap();
        assert_eq!(all.patterns_len(), 3);
        assert!(begin.elapsed() < std::time::Duration::from_secs(20), "{:?}", begin.elapsed());
        let few = Controls::new(tokens(1)).unwrap();
        assert_eq!(source(LITERALS_MAX - 1, LITERALS_MAX).comparable(&few).unwrap().patterns_len(), LITERALS_MAX);
        let told = source(LITERALS_MAX, LITERALS_MAX).comparable(&few).unwrap_err().to_string();
        assert!(told.contains("4097 different string literals"), "{told}");
    }

    proptest! {
        #[test]
        fn pieces_are_the_source(template in "[{}%#'\"\\\\a é-]{0,40}") {
            let source = Source::new(&template).unwrap();
            prop_assert_eq!(source.map_output(str::to_owned), template);
        }
    }
}
