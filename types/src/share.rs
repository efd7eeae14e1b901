//! A sequence's tenant and its weight, where tenants share a worker.

use std::fmt;

/// Names a tenant to workers, which know nothing else of it: equal labels mean the same tenant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantLabel(pub u64);

/// A tenant's weight relative to others: weight 2 gets twice the share of weight 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Weight(u32);

/// A number that is not a valid weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a weight is 1 to {max}, got {0}", max = Weight::MAX.0)]
pub struct WeightError(u32);

impl Weight {
    /// The largest weight: beside it, a tenant of weight 1 still gets one row in a thousand.
    pub const MAX: Self = Self(1000);

    /// A weight of 1 to [`Weight::MAX`]; other numbers are an error.
    pub fn try_new(weight: u32) -> Result<Self, WeightError> {
        if (1..=Self::MAX.0).contains(&weight) { Ok(Self(weight)) } else { Err(WeightError(weight)) }
    }

    /// The weight as a number.
    pub fn get(self) -> u32 {
        self.0
    }
}

impl Default for Weight {
    fn default() -> Self {
        Self(1)
    }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The tenant of a sequence and its weight. The default is used for every sequence if tenants are not distinguished.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Share {
    pub tenant: TenantLabel,
    pub weight: Weight,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_checked() {
        assert_eq!([1, 1000].map(|n| Weight::try_new(n).map(Weight::get)), [Ok(1), Ok(1000)]);
        for none in [0, 1001, u32::MAX] {
            assert_eq!(Weight::try_new(none), Err(WeightError(none)));
        }
        assert_eq!(WeightError(0).to_string(), "a weight is 1 to 1000, got 0");
    }
}
