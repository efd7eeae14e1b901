//! The keys of a file. Pure.

use super::{Caller, Key, KeyLimits};
use baton_types::{TenantId, Weight};
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use std::collections::hash_map::Entry;

/// Most keys of one file.
pub(super) const KEYS_MAX: usize = 10_000;

/// A digest by SHA-256.
pub(super) type Hash = [u8; 32];

/// The SHA-256 of `bytes`.
pub(super) fn hash(bytes: &[u8]) -> Hash {
    Sha256::digest(bytes).into()
}

/// Callers by the hashes of their keys.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Keys(HashMap<Hash, Caller>);

/// What is wrong with a file. No text of the file is in it: the operator may have written a key in place of its hash.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Bytes that are not text.
    #[error("it is not UTF-8 text")]
    NoText,
    /// No key: no client could call.
    #[error("it has no keys; add one, or unset auth.keys_file to let everybody call")]
    NoKeys,
    /// It holds more than [`KEYS_MAX`] keys.
    #[error("it holds more than {KEYS_MAX} keys")]
    TooMany,
    /// The first word of a line.
    #[error(
        "line {0} does not begin with the SHA-256 of a key in hex, 64 digits; printf %s \"$KEY\" | sha256sum prints it"
    )]
    Hash(usize),
    /// The second word of a line.
    #[error(
        "line {0} names no tenant: the second word must be 1 to 63 printable ASCII characters and more than the - of sha256sum"
    )]
    Tenant(usize),
    /// The words after it.
    #[error(
        "line {0} has more than a hash and a tenant: nothing but `operator`, `priority_max=N`, `requests_max=N`, `tokens_max=N` and `weight=N` may follow, each once"
    )]
    More(usize),
    /// A limit that is not valid.
    #[error("line {0} has a limit that is none: {1}")]
    Limit(usize, &'static str),
    /// A second, different weight for a tenant.
    #[error(
        "line {again} gives its tenant another weight than line {first}: the weight is the tenant's, whatever the key"
    )]
    Weight {
        /// The line where it is set first.
        first: usize,
        /// The line where it is set again.
        again: usize,
    },
    /// The same key again.
    #[error("line {again} has the same hash as line {first}: a key belongs to one tenant")]
    Twice {
        /// The line where it is first.
        first: usize,
        /// The line where it is again.
        again: usize,
    },
}

impl Keys {
    /// Reads a whole file; lines count from 1.
    pub(super) fn parse(bytes: &[u8], limits: KeyLimits) -> Result<Self, Problem> {
        let text = std::str::from_utf8(bytes).map_err(|_| Problem::NoText)?;
        let (mut keys, mut lines) = (HashMap::new(), HashMap::new());
        let mut weights: HashMap<TenantId, (Weight, usize)> = HashMap::new();
        for (number, line) in (1..).zip(text.lines()) {
            let Some(Line { hash, caller, weight }) = read_line(number, line, limits)? else { continue };
            if let Some(weight) = weight {
                let (known, first) = *weights.entry(caller.tenant.clone()).or_insert((weight, number));
                if known != weight {
                    return Err(Problem::Weight { first, again: number });
                }
            }
            match lines.entry(hash) {
                Entry::Occupied(first) => return Err(Problem::Twice { first: *first.get(), again: number }),
                Entry::Vacant(place) => place.insert(number),
            };
            keys.insert(hash, caller);
            if keys.len() > KEYS_MAX {
                return Err(Problem::TooMany);
            }
        }
        for caller in keys.values_mut() {
            caller.weight = weights.get(&caller.tenant).map_or_else(Weight::default, |(weight, _)| *weight);
        }
        if keys.is_empty() { Err(Problem::NoKeys) } else { Ok(Self(keys)) }
    }

    /// One key, of the tenant of callers without any.
    pub(super) fn one(key: &[u8], operator: bool, limits: KeyLimits) -> Self {
        let id = hash(key);
        let (tenant, weight) = Default::default();
        Self([(id, Caller { tenant, operator, weight, key: Some(Key { id, limits }) })].into())
    }

    /// The caller that owns this key.
    pub(super) fn caller(&self, key: &[u8]) -> Option<Caller> {
        self.0.get(&hash(key)).cloned()
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Content of one line.
struct Line {
    hash: Hash,
    caller: Caller,
    /// The weight of its tenant.
    weight: Option<Weight>,
}

/// The key of one line; `None` if the line holds none.
fn read_line(number: usize, line: &str, mut limits: KeyLimits) -> Result<Option<Line>, Problem> {
    let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
    let Some(first) = words.next() else { return Ok(None) };
    let mut hash = Hash::default();
    hex::decode_to_slice(first, &mut hash).map_err(|_| Problem::Hash(number))?;
    let tenant = words.next().filter(|word| *word != "-").and_then(|word| TenantId::try_new(word).ok());
    let tenant = tenant.ok_or(Problem::Tenant(number))?;
    let (mut operator, mut weight, mut known) = (false, None, Vec::new());
    for word in words {
        let name = word.split('=').next().unwrap_or_default();
        let (is_operator, twice) = (word == "operator", known.contains(&name));
        if let Some(of_tenant) = word.strip_prefix("weight=") {
            let of_tenant = of_tenant.parse().ok().and_then(|n| Weight::try_new(n).ok());
            weight = Some(of_tenant.ok_or(Problem::Limit(number, "weight is 1 to 1000"))?);
        } else if !(is_operator || limits.take(word, number)?) {
            return Err(Problem::More(number));
        }
        if twice {
            return Err(Problem::More(number));
        }
        operator |= is_operator;
        known.push(name);
    }
    let caller = Caller { tenant, operator, weight: Weight::default(), key: Some(Key { id: hash, limits }) };
    Ok(Some(Line { hash, caller, weight }))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: KeyLimits = KeyLimits { priority_max: 0, requests_max: 9, tokens_max: 99 };

    fn parse(bytes: &[u8]) -> Result<Keys, Problem> {
        Keys::parse(bytes, LIMITS)
    }

    fn line(key: &str, rest: &str) -> String {
        format!("{} {rest}", hex::encode(hash(key.as_bytes())))
    }

    #[test]
    fn callers_are_found_by_their_keys() {
        let text = format!(
            "# ours\n\n{}\n  {}\t# a note\r\n{}\n",
            line("one", "alice"),
            line("two", "bob").to_uppercase().replace("BOB", "bob"),
            line("three", "alice operator # both")
        );
        let keys = parse(text.as_bytes()).unwrap();
        let caller = |key: &str| keys.caller(key.as_bytes()).map(|c| (c.tenant.to_string(), c.operator));
        assert_eq!(caller("one"), Some(("alice".into(), false)));
        assert_eq!(caller("two"), Some(("bob".into(), false)));
        assert_eq!(caller("three"), Some(("alice".into(), true)));
        let hash_of_one = hex::encode(hash(b"one"));
        for nobody in ["", "One", "one ", &hash_of_one] {
            assert_eq!(caller(nobody), None, "{nobody}");
        }
        assert_eq!(keys.len(), 3);
    }

    #[test]
    fn a_key_has_its_limits_or_those_of_all() {
        let text = [
            line("one", "a"),
            line("two", "a tokens_max=7 operator priority_max=-5"),
            line("three", "a requests_max=1"),
        ];
        let keys = parse(text.join("\n").as_bytes()).unwrap();
        let limits = |key: &str| {
            let KeyLimits { priority_max, requests_max, tokens_max } =
                keys.caller(key.as_bytes()).unwrap().key.unwrap().limits;
            (priority_max, requests_max, tokens_max)
        };
        assert_eq!([limits("one"), limits("two"), limits("three")], [(0, 9, 99), (-5, 9, 7), (0, 1, 99)]);
        assert!(keys.caller(b"two").unwrap().operator);
    }

    #[test]
    fn a_weight_is_the_tenants_whatever_the_key() {
        let text = [
            line("one", "alice"),
            line("two", "alice operator weight=3"),
            line("three", "alice weight=3"),
            line("four", "bob"),
            line("five", "carol weight=1000"),
        ];
        let keys = parse(text.join("\n").as_bytes()).unwrap();
        let weights =
            ["one", "two", "three", "four", "five"].map(|key| keys.caller(key.as_bytes()).unwrap().weight.get());
        assert_eq!(weights, [3, 3, 3, 1, 1000]);
        let two = [line("one", "alice weight=3"), line("two", "bob weight=2"), line("three", "alice weight=2")];
        assert_eq!(parse(two.join("\n").as_bytes()).unwrap_err(), Problem::Weight { first: 1, again: 3 });
    }

    #[test]
    fn a_hash_is_what_sha256sum_prints() {
        let printed = "2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90 a";
        let keys = parse(printed.as_bytes()).unwrap();
        assert!(keys.caller(b"alice").is_some());
    }

    #[test]
    fn what_is_wrong_is_told_by_its_line() {
        let check = |text: &str, expected: Problem| {
            let found = parse(text.as_bytes()).unwrap_err();
            assert_eq!(found, expected, "{text}");
            assert!(!found.to_string().contains("sk-secret") && !found.to_string().contains("2bd806"), "{found}");
        };
        check("", Problem::NoKeys);
        check("# nothing yet\n\n", Problem::NoKeys);
        check(&format!("{}\nsk-secret alice", line("a", "alice")), Problem::Hash(2));
        check(&format!("{}0 alice", hex::encode(hash(b"a"))), Problem::Hash(1));
        check(&line("a", ""), Problem::Tenant(1));
        check(&line("a", "-"), Problem::Tenant(1));
        check(&line("a", "# alice"), Problem::Tenant(1));
        check(&line("a", &hex::encode(hash(b"b"))), Problem::Tenant(1));
        check(&line("a", "alice admin"), Problem::More(1));
        check(&line("a", "- alice"), Problem::Tenant(1));
        check(&line("a", "alice operator sk-secret"), Problem::More(1));
        check(&line("a", "alice operator operator"), Problem::More(1));
        check(&line("a", "alice tokens_max=1 tokens_max=1"), Problem::More(1));
        check(&line("a", "alice sk-secret=1"), Problem::More(1));
        check(&line("a", "alice priority_max=101"), Problem::Limit(1, "priority_max is -100 to 100"));
        for none in ["0", "-1", "", "many"] {
            check(&line("a", &format!("alice requests_max={none}")), Problem::Limit(1, "requests_max is 1 or more"));
        }
        for none in ["0", "1001", "-1", "", "heavy"] {
            check(&line("a", &format!("alice weight={none}")), Problem::Limit(1, "weight is 1 to 1000"));
        }
        check(&line("a", "alice weight=2 weight=2"), Problem::More(1));
        let twice = format!("{}\n\n{}", line("alice", "alice"), line("alice", "bob"));
        check(&twice, Problem::Twice { first: 1, again: 3 });
        assert_eq!(parse(&[0xff, 0xfe]).unwrap_err(), Problem::NoText);
        let many: Vec<String> = (0..=KEYS_MAX).map(|n| line(&n.to_string(), "alice")).collect();
        check(&many.join("\n"), Problem::TooMany);
        assert_eq!(parse(many[1..].join("\n").as_bytes()).unwrap().len(), KEYS_MAX);
    }
}
