//! Whom a request asks next after workers failed it.

use super::Avoid;
use baton_types::{Party, Role};

/// Workers that failed one request, and whether they may be asked again.
#[derive(Debug, Default)]
pub struct Avoided(Vec<(Party, Avoid)>);

/// Ever wider circles of workers: the next one is asked where nothing fits in those before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Circle {
    /// Nobody failed anybody.
    Trusted,
    /// Nobody failed this request.
    Untried,
    /// A decode worker that failed is tried again, and without a prefill worker that failed.
    DecodersAgain,
    /// Everybody who may be asked at all.
    All,
}

impl Circle {
    /// In the order in which they are asked.
    pub const WIDENING: [Self; 4] = [Self::Trusted, Self::Untried, Self::DecodersAgain, Self::All];
}

impl Avoided {
    /// This worker failed the request.
    pub fn add(&mut self, party: Party, how: Avoid) {
        self.0.push((party, how));
    }

    /// Whether a worker is in the circle. `on_probation`: it failed other requests of late.
    pub fn admits(&self, party: &Party, role: Role, on_probation: bool, circle: Circle) -> bool {
        let is_avoided = |how: Option<Avoid>| self.0.iter().any(|(p, h)| p == party && how.is_none_or(|how| how == *h));
        if is_avoided(Some(Avoid::Strictly)) {
            return false;
        }
        match circle {
            Circle::Trusted => !is_avoided(None) && !on_probation,
            Circle::Untried => !is_avoided(None),
            Circle::DecodersAgain => role == Role::Decode || !is_avoided(None),
            Circle::All => true,
        }
    }
}
