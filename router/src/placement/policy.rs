//! The policies by name.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::str::FromStr;

/// How workers are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementPolicy {
    /// By the time that first and later tokens take on a worker, cached prefixes included.
    #[default]
    Cost,
    /// Each worker in turn, ignoring load and cache; for comparison.
    RoundRobin,
    /// The shortest queue and the emptiest batch, ignoring the cache; for comparison.
    LeastLoaded,
}

impl PlacementPolicy {
    pub const ALL: [Self; 3] = [Self::Cost, Self::RoundRobin, Self::LeastLoaded];

    /// Its name in configurations and on command lines.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
        }
    }
}

impl fmt::Display for PlacementPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The name of an unknown policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no placement policy {0:?}; there are cost, round-robin and least-loaded")]
pub struct UnknownPolicy(String);

impl FromStr for PlacementPolicy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        let named = Self::ALL.into_iter().find(|policy| policy.name() == name);
        named.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_configurations() {
        for policy in PlacementPolicy::ALL {
            assert_eq!(policy.name().parse(), Ok(policy));
            assert_eq!(serde_json::to_value(policy).unwrap(), policy.name());
        }
        assert!("fastest".parse::<PlacementPolicy>().unwrap_err().to_string().contains("round-robin"));
    }
}
