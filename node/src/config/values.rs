//! Value types for configuration: sizes with units, lists with commas, secrets.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A size in bytes. Written as a number, or with a unit: `2GiB`, `512 MiB`, `1500MB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct ByteSize(pub u64);

const UNITS: [(&str, u64); 10] = [
    ("", 1),
    ("b", 1),
    ("kib", 1 << 10),
    ("mib", 1 << 20),
    ("gib", 1 << 30),
    ("tib", 1 << 40),
    ("kb", 1_000),
    ("mb", 1_000_000),
    ("gb", 1_000_000_000),
    ("tb", 1_000_000_000_000),
];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let refuse = || format!("{text:?} is not a size; write a number of bytes or e.g. 512MiB, 2GiB");
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| refuse())?;
        let unit = text[digits..].trim().to_ascii_lowercase();
        let (_, factor) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(refuse)?;
        number.checked_mul(*factor).map(Self).ok_or_else(refuse)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = UNITS[2..6].iter().rev().zip(["TiB", "GiB", "MiB", "KiB"]);
        match binary.into_iter().find(|((_, factor), _)| self.0 >= *factor && self.0.is_multiple_of(*factor)) {
            Some(((_, factor), name)) => write!(f, "{}{name}", self.0 / factor),
            None => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Size;
        impl Visitor<'_> for Size {
            type Value = ByteSize;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size in bytes, or text such as \"2GiB\"")
            }
            fn visit_u64<E: Error>(self, bytes: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(bytes))
            }
            fn visit_i64<E: Error>(self, bytes: i64) -> Result<ByteSize, E> {
                u64::try_from(bytes).map(ByteSize).map_err(|_| E::custom("a size cannot be negative"))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<ByteSize, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Size)
    }
}

/// A list, also accepted as one text with commas (`a, b`), for variables and flags. Use with
/// `#[serde(deserialize_with)]`.
pub fn list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany {
        One(String),
        Many(Vec<String>),
    }
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(text) => text.split(',').map(str::trim).filter(|s| !s.is_empty()).map(String::from).collect(),
        OneOrMany::Many(list) => list,
    })
}

/// Printed in place of a secret.
const MASK: &str = "********";

/// A text that is never printed. It cannot be a flag, since flags are visible in process lists; serializing masks it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// A secret that does not come from a configuration.
    pub(crate) fn new(secret: String) -> Self {
        Self(secret)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(MASK)
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        if text == MASK {
            return Err(D::Error::custom("this is the mask of a dumped secret, not the secret"));
        }
        Ok(Self(text))
    }
}

/// Masks the user part of every URL in the tree.
pub(super) fn mask_urls(value: &mut toml::Value) {
    match value {
        toml::Value::String(text) => {
            if let Some(start) = text.find("://").map(|i| i + 3) {
                let authority_end = text[start..].find(['/', '?', '#']).map_or(text.len(), |i| start + i);
                if let Some(at) = text[start..authority_end].rfind('@') {
                    text.replace_range(start..start + at, MASK);
                }
            }
        }
        toml::Value::Array(items) => items.iter_mut().for_each(mask_urls),
        toml::Value::Table(table) => table.iter_mut().for_each(|(_, v)| mask_urls(v)),
        _ => {}
    }
}
