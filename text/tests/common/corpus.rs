//! Lines of mixed text from a seed: text of people, output of programs, and text that is meant to break tokenizers.

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

const WORDS: &str = "the of and to in is you that it he was for on are as with his they at be this have from or one had by word \
    but not what all were we when your can said there use an each which she do how their if will up other about out many then them \
    these so some her would make like him into time has look two more write go see number no way could people my than first water \
    been call who oil its now find long down day did get come made may part antidisestablishmentarianism Tokenizer I'll we've IT'S \
    don't 'tis rock'n'roll naïve café Straße Ångström façade";
const CODE: &str = "fn let mut self impl struct return => -> :: != == <= >= && || += { } ( ) [ ] ; , . .. ... // /// /* */ #[derive(Debug)] \
    def class None True import std::collections::HashMap snake_case_name camelCaseName SCREAMING_CASE x86_64 0xdeadbeef 1e-9 \
    &'static <T> Option<u32> println!(\"{}\") $HOME ~/.config https://example.com/a?b=c&d=%20 user@example.com \\n \\u{1F600} `` ''' \"\"\"";
const CONTROLS: &str =
    "<|im_start|> <|im_end|> <|endoftext|> <file_sep> <empty_output> <| |> <|im_ <s> </s> <|eot_id|> <think> [INST]";
const JOINED: &str = "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇫🇷 🇫 ❤️ ☠︎ 🧑🏿‍🚀 #️⃣ ‍ ️";
/// Spellings that normalization changes: decomposed letters, Hangul in parts, signs that equal letters, marks out of
/// order.
const VARIANTS: &str = "é ñ ạ̊ ạ̊ q̣̇ q̣̇ 각 가 각 Å Ω K ﬁ ﬀ ½ ² ① ㎏ דּ क़ ਖ਼ ͏ ̈́ 豈 ﷺ ゔ ば ｶﾞ";
const SPACES: [char; 14] = [
    ' ', ' ', ' ', '\t', '\n', '\r', '\u{b}', '\u{85}', '\u{a0}', '\u{2003}', '\u{200b}', '\u{2028}', '\u{3000}',
    '\u{feff}',
];
/// First and last characters of scripts, numerals and signs.
const RANGES: [(u32, u32); 28] = [
    (0x370, 0x3ff),
    (0x400, 0x4ff),
    (0x531, 0x587),
    (0x5d0, 0x5ea),
    (0x620, 0x66f),
    (0x900, 0x97f),
    (0x980, 0x9ff),
    (0xb80, 0xbff),
    (0xe00, 0xe5b),
    (0xf00, 0xfbc),
    (0x10a0, 0x10ff),
    (0x1100, 0x11ff),
    (0x1200, 0x137f),
    (0x1e00, 0x1fff),
    (0x2000, 0x206f),
    (0x2070, 0x218b),
    (0x2190, 0x23ff),
    (0x2500, 0x27bf),
    (0x3040, 0x30ff),
    (0x4e00, 0x9fff),
    (0xac00, 0xd7a3),
    (0xf900, 0xfaff),
    (0xff00, 0xffef),
    (0x10400, 0x1044f),
    (0x1d400, 0x1d7ff),
    (0x1f300, 0x1faff),
    (0x20000, 0x2a6df),
    (0xe0100, 0xe01ef),
];

/// Lines without end, the same for the same seed.
pub(crate) struct Corpus {
    rng: StdRng,
    words: Vec<&'static str>,
    code: Vec<&'static str>,
    odd: Vec<&'static str>,
}

impl Corpus {
    pub(crate) fn new(seed: u64) -> Self {
        let list = |text: &'static str| text.split_ascii_whitespace();
        Self {
            rng: StdRng::seed_from_u64(seed),
            words: list(WORDS).collect(),
            code: list(CODE).collect(),
            odd: list(CONTROLS).chain(list(JOINED)).chain(list(VARIANTS)).collect(),
        }
    }

    fn pick(&mut self, from: u32, to: u32) -> char {
        char::from_u32(self.rng.random_range(from..=to)).unwrap_or(char::REPLACEMENT_CHARACTER)
    }

    fn run(&mut self, length_max: usize, mut one: impl FnMut(&mut Self) -> char, line: &mut String) {
        let length = self.rng.random_range(1..=length_max);
        line.extend((0..length).map(|_| one(self)));
    }

    fn piece(&mut self, line: &mut String) {
        match self.rng.random_range(0..1000) {
            0..400 => line.push_str(self.words.choose(&mut self.rng).expect("not empty")),
            400..530 => line.push_str(self.code.choose(&mut self.rng).expect("not empty")),
            530..600 => line.push_str(self.odd.choose(&mut self.rng).expect("not empty")),
            600..660 => self.run(12, |c| c.pick('0'.into(), '9'.into()), line),
            660..720 => self.run(12, |c| c.pick('a'.into(), 'z'.into()), line),
            720..760 => self.run(6, |c| *SPACES.choose(&mut c.rng).expect("not empty"), line),
            760..900 => {
                let (from, to) = *RANGES.choose(&mut self.rng).expect("not empty");
                self.run(12, |c| c.pick(from, to), line);
            }
            900..940 => self.run(12, |c| c.pick(0, 255), line),
            940..965 => self.run(8, |c| c.pick('!'.into(), '/'.into()), line),
            965..990 => self.run(4, |c| c.pick(0, 0x10ffff), line),
            990..996 => self.run(120, |c| c.pick('+'.into(), 'z'.into()), line),
            996..999 => self.run(60, |_| ' ', line),
            _ => {
                let (from, to) =
                    [(0x61, 0x7a), (0x61, 0x62), (0x20, 0x20), (0x4e00, 0x4eff)][self.rng.random_range(0..4)];
                self.run(1500, |c| c.pick(from, to), line);
            }
        }
    }
}

impl Iterator for Corpus {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        let mut line = String::new();
        for _ in 0..self.rng.random_range(0..16) {
            self.piece(&mut line);
            if self.rng.random_bool(0.7) {
                line.push(' ');
            }
        }
        Some(line)
    }
}
