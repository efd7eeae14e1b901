//! What a set of cases has covered, so that a missing combination is visible.

use std::collections::BTreeMap;
use std::fmt;

/// How often each value of each dimension was used.
#[derive(Clone, Debug, Default)]
pub struct Coverage(BTreeMap<&'static str, BTreeMap<String, usize>>);

impl Coverage {
    /// Counts `times` occurrences of a value.
    pub fn add(&mut self, dimension: &'static str, value: impl fmt::Display, times: usize) {
        if times > 0 {
            *self.0.entry(dimension).or_default().entry(value.to_string()).or_default() += times;
        }
    }

    /// Counts one occurrence.
    pub fn note(&mut self, dimension: &'static str, value: impl fmt::Display) {
        self.add(dimension, value, 1);
    }

    /// Adds what `other` has counted.
    pub fn merge(&mut self, other: &Self) {
        for (dimension, values) in &other.0 {
            values.iter().for_each(|(value, count)| self.add(dimension, value, *count));
        }
    }

    /// Those of these values that were never used.
    pub fn missing<'a>(&self, wanted: &[(&'static str, &[&'a str])]) -> Vec<(&'static str, &'a str)> {
        let absent =
            |dimension: &str, value: &str| self.0.get(dimension).is_none_or(|values| !values.contains_key(value));
        let each = wanted.iter().flat_map(|(dimension, values)| values.iter().map(|value| (*dimension, *value)));
        each.filter(|(dimension, value)| absent(dimension, value)).collect()
    }
}

impl fmt::Display for Coverage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (dimension, values) in &self.0 {
            let values: Vec<_> = values.iter().map(|(value, count)| format!("{value}: {count}")).collect();
            writeln!(f, "{dimension:<22} {}", values.join(", "))?;
        }
        Ok(())
    }
}
