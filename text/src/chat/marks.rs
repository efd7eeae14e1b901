//! Private-use characters that stand for control tokens while a template renders.
//!
//! There are two kinds. A *sentinel* stands for a control token that the template spells; it occurs in the template's
//! source and in its begin and end tokens. A *shadow* stands for one character of a client's text. It is used only in a
//! second rendering, when the first contains a control token spelled out in letters. The second rendering shows who
//! wrote those letters: every character of the client's text that occurs in any control token is shadowed, so a control
//! token that is still spelled comes from the template only. Literals that the template may search content for
//! (`'</think>' in content`) are not shadowed if they cannot be a part of a control token. If the second rendering,
//! with shadows resolved, differs from the first, the template took another branch and nothing is proven. Then the
//! request is refused.

use aho_corasick::AhoCorasick;

use super::{ChatRequest, json};
use crate::tokenizer::control::Controls;
use crate::{Content, Prompt, TextError};

/// The private-use planes, 15 and 16.
const PLANES: [(u32, u32); 2] = [(0x10_0000, 0x10_FFFD), (0xF_0000, 0xF_FFFD)];

/// A run of private-use characters: sentinels by index of the control token, then shadows by character, then one for the
/// end of a message that is continued.
#[derive(Debug)]
pub(super) struct Marks {
    base: u32,
    controls: u32,
    /// Characters that occur in control tokens, sorted.
    alphabet: Vec<char>,
}

impl Marks {
    /// Marks that do not occur in `text`.
    pub(super) fn avoiding(controls: &Controls, text: &str) -> Result<Self, TextError> {
        let mut alphabet: Vec<char> = controls.tokens().iter().flat_map(|(_, spelling)| spelling.chars()).collect();
        alphabet.sort_unstable();
        alphabet.dedup();
        let len = (controls.tokens().len() + alphabet.len() + 1) as u32;
        let mut taken: Vec<u32> = text.chars().map(u32::from).filter(|c| *c >= PLANES[1].0).collect();
        taken.sort_unstable();
        let free = |base: &u32| taken.partition_point(|c| c < base) == taken.partition_point(|c| *c < base + len);
        let bases = PLANES.iter().flat_map(|(first, last)| {
            let runs = (last + 1 - first) / len;
            (0..runs).map(move |run| first + run * len)
        });
        match bases.into_iter().find(free) {
            Some(base) => Ok(Self { base, controls: controls.tokens().len() as u32, alphabet }),
            None => Err(TextError::TemplateTooLong("the private-use characters of Unicode")),
        }
    }

    /// Whether any text of the request contains one of these characters.
    pub(super) fn occur_in(&self, request: &ChatRequest<'_>) -> bool {
        let all = self.base..=u32::from(self.end());
        let mut found = false;
        visit(request, &mut |text| found |= text.chars().any(|c| all.contains(&u32::from(c))));
        found
    }

    /// Marks the end of a message that is continued.
    pub(super) fn end(&self) -> char {
        let at = self.base + self.controls + self.alphabet.len() as u32;
        char::from_u32(at).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    /// The character that a shadow stands for; any other one itself.
    pub(super) fn original(&self, c: char) -> char {
        let shadow = u32::from(c).checked_sub(self.base + self.controls);
        shadow.and_then(|i| self.alphabet.get(i as usize)).copied().unwrap_or(c)
    }

    /// `text` with a sentinel for every control token that it spells.
    pub(super) fn mark(&self, text: &str, controls: &Controls) -> String {
        let mut out = String::with_capacity(text.len());
        let mut at = 0;
        for (range, index) in controls.find(text) {
            out.push_str(&text[at..range.start]);
            out.extend(char::from_u32(self.base + index as u32));
            at = range.end;
        }
        out + &text[at..]
    }

    /// A client's text with every character that could be a part of a control token shadowed, except in these literals:
    /// the leftmost, and of those with the same start the longest.
    pub(super) fn shadow(&self, text: &str, literals: &AhoCorasick) -> String {
        let mut out = String::with_capacity(text.len());
        let mut at = 0;
        for literal in literals.find_iter(text) {
            self.shadow_all(&text[at..literal.start()], &mut out);
            out.push_str(&text[literal.range()]);
            at = literal.end();
        }
        self.shadow_all(&text[at..], &mut out);
        out
    }

    fn shadow_all(&self, text: &str, out: &mut String) {
        let shadow = |c: char| match self.alphabet.binary_search(&c) {
            Ok(i) => char::from_u32(self.base + self.controls + i as u32),
            Err(_) => Some(c),
        };
        out.extend(text.chars().filter_map(shadow));
    }

    /// Whether a rendering still contains a control token spelled in letters.
    pub(super) fn spells_controls(&self, output: &str, controls: &Controls) -> bool {
        controls.find(output).next().is_some()
    }

    /// Resolves the marks of a rendering: sentinels become control tokens, shadows the characters they stand for. With
    /// `composed`, control tokens spelled in letters are also converted.
    pub(super) fn resolve(&self, output: &str, controls: &Controls, composed: bool) -> Prompt {
        let mut prompt = Prompt::default();
        let mut at = 0;
        let spelled = composed.then(|| controls.find(output)).into_iter().flatten();
        for (range, index) in spelled {
            self.resolve_marks(&output[at..range.start], controls, &mut prompt);
            let (token, spelling) = &controls.tokens()[index];
            prompt.push_control(*token, spelling);
            at = range.end;
        }
        self.resolve_marks(&output[at..], controls, &mut prompt);
        prompt
    }

    fn resolve_marks(&self, output: &str, controls: &Controls, prompt: &mut Prompt) {
        for c in output.chars() {
            let index = u32::from(c).checked_sub(self.base).map(|i| i as usize);
            let sentinel = index.and_then(|i| controls.tokens().get(i));
            let shadowed = index.and_then(|i| self.alphabet.get(i.checked_sub(self.controls as usize)?));
            match (sentinel, shadowed) {
                (Some((token, spelling)), _) => prompt.push_control(*token, spelling),
                (None, Some(original)) => prompt.push_char(*original),
                (None, None) => prompt.push_char(c),
            }
        }
    }
}

/// All characters of the private-use planes in a request and in the template.
pub(super) fn foreign(request: &ChatRequest<'_>, template: &str) -> String {
    let private = |text: &str| text.chars().filter(|c| u32::from(*c) >= PLANES[1].0).collect::<String>();
    let mut all = private(template);
    visit(request, &mut |text| all.push_str(&private(text)));
    all
}

/// Visits every text that a client wrote.
fn visit(request: &ChatRequest<'_>, see: &mut dyn FnMut(&str)) {
    for message in request.messages {
        match &message.content {
            Some(Content::Text(text)) => see(text),
            Some(Content::Parts(parts)) => parts.iter().for_each(|part| see(part)),
            None => {}
        }
        json::visit_map(&message.extra, see);
    }
    request.tools.into_iter().for_each(|tools| json::visit(tools, see));
    json::visit_map(request.arguments, see);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::control::finder;
    use proptest::prelude::*;
    use std::time::{Duration, Instant};

    fn controls(spellings: &[&str]) -> Controls {
        Controls::new((0..).zip(spellings.iter().map(|s| (*s).to_owned())).collect()).unwrap()
    }

    #[test]
    fn a_long_text_is_compared_with_all_literals_at_once() {
        let literals: Vec<String> = (0..4_000).map(|n| format!("[literal {n}]")).collect();
        let literals = finder("string literals", literals.iter().map(String::as_str)).unwrap();
        let marks = Marks::avoiding(&controls(&["<|im_end|>"]), "").unwrap();
        let text = "[literal, of a text ".repeat(200_000);
        let begin = Instant::now();
        assert_eq!(marks.shadow(&text, &literals).chars().count(), text.len());
        assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    }

    proptest! {
        #[test]
        fn all_but_literals_is_shadowed(text in "[abc<é]{0,30}", literals in prop::collection::vec("[abé]{1,3}", 0..5)) {
            let marks = Marks::avoiding(&controls(&["<a|é>"]), "").unwrap();
            let mut expected = String::new();
            let mut rest = &*text;
            while let Some(c) = rest.chars().next() {
                let longest = literals.iter().filter(|l| rest.starts_with(l.as_str())).max_by_key(|l| l.len());
                let (shown, others) = rest.split_at(longest.map_or(c.len_utf8(), |l| l.len()));
                match marks.alphabet.binary_search(&c) {
                    Ok(i) if longest.is_none() => expected.extend(char::from_u32(marks.base + marks.controls + i as u32)),
                    _ => expected.push_str(shown),
                }
                rest = others;
            }
            let found = marks.shadow(&text, &finder("string literals", literals.iter().map(String::as_str)).unwrap());
            prop_assert_eq!(found, expected);
        }
    }
}
