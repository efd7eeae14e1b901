//! The number of compute threads, as configuration has it.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// Compute threads of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThreadCount {
    /// `auto`, or 0: all cores of the host.
    #[default]
    Auto,
    /// So many.
    Fixed(usize),
}

impl ThreadCount {
    /// As a number, `Auto` being `cores`.
    pub fn of(self, cores: usize) -> usize {
        match self {
            Self::Auto => cores,
            Self::Fixed(count) => count,
        }
    }
}

impl From<usize> for ThreadCount {
    fn from(count: usize) -> Self {
        if count == 0 { Self::Auto } else { Self::Fixed(count) }
    }
}

impl FromStr for ThreadCount {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(usize::into).map_err(|_| "`auto` or a number of threads"),
        }
    }
}

impl fmt::Display for ThreadCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(count) => count.fmt(f),
        }
    }
}

impl Serialize for ThreadCount {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Auto => to.serialize_str("auto"),
            Self::Fixed(count) => to.serialize_u64(*count as u64),
        }
    }
}

impl<'de> Deserialize<'de> for ThreadCount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Count;

        impl Visitor<'_> for Count {
            type Value = ThreadCount;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("`auto` or a number of threads")
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<ThreadCount, E> {
                text.parse().map_err(E::custom)
            }

            fn visit_u64<E: Error>(self, count: u64) -> Result<ThreadCount, E> {
                usize::try_from(count).map(usize::into).map_err(E::custom)
            }

            fn visit_i64<E: Error>(self, count: i64) -> Result<ThreadCount, E> {
                usize::try_from(count).map(usize::into).map_err(E::custom)
            }
        }

        from.deserialize_any(Count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_a_number_or_auto() {
        let json = |text: &str| serde_json::from_str::<ThreadCount>(text).ok();
        for (text, expected) in [
            ("\"auto\"", Some(ThreadCount::Auto)),
            ("0", Some(ThreadCount::Auto)),
            ("3", Some(ThreadCount::Fixed(3))),
            ("\"3\"", Some(ThreadCount::Fixed(3))),
            ("-1", None),
            ("\"all\"", None),
            ("1.5", None),
        ] {
            assert_eq!(json(text), expected, "{text}");
        }
        for count in [ThreadCount::Auto, ThreadCount::Fixed(7)] {
            assert_eq!(json(&serde_json::to_string(&count).unwrap()), Some(count));
            assert_eq!(count.to_string().parse(), Ok(count));
        }
        assert_eq!((ThreadCount::Auto.of(8), ThreadCount::Fixed(2).of(8)), (8, 2));
    }
}
