//! Claims: capacity that a router has booked on this worker for sequences whose KV has yet to arrive. Pure.
//!
//! A claim holds no blocks. It bounds how much KV may be on its way and names the instance that may turn it into a reservation (once). It
//! ends with the stream that booked it.

use baton_engine::fair::is_within;
use baton_types::{ErrorKind, Party, RequestError, RequestId, Share, seeded};
use std::collections::{HashMap, HashSet};
use std::time::Duration;

/// Bounds of a [`Claims`]. If several tenants have claims, a tenant below its share of them may exceed these bounds, up to twice their
/// value.
#[derive(Clone, Copy, Debug)]
pub struct ClaimLimits {
    /// Most claims at once.
    pub claims_max: usize,
    /// Most tokens claimed at once: claims for more than the pool can only wait.
    pub tokens_max: u64,
}

/// One booked claim, with the data `T` that its stream needs.
#[derive(Debug)]
pub struct Claim<T> {
    /// Only this instance, in this incarnation, may reserve for it.
    pub source: Party,
    /// Positions whose KV will arrive.
    pub tokens: u32,
    /// Its tenant and weight.
    pub share: Share,
    /// Whether its offer has arrived.
    pub offered: bool,
    /// What the stream of the claim needs; not used here.
    pub stream: T,
}

/// Why an offer does not match a claim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OfferError {
    /// There is no claim, or none for this source.
    #[error("{0}")]
    NotClaimed(String),
    /// The claim is over another number of tokens, or has already had its offer.
    #[error("{0}")]
    Contradicts(String),
}

/// All claims of a decode worker.
#[derive(Debug)]
pub struct Claims<T> {
    limits: ClaimLimits,
    by_request: HashMap<RequestId, Claim<T>>,
    /// Ids of open streams, whether or not their claims were taken: the end of one stream never ends another's claim.
    streams: HashSet<RequestId>,
    tokens: u64,
}

impl<T> Claims<T> {
    /// Starts without claims; `limits` bounds the later ones.
    pub fn new(limits: ClaimLimits) -> Self {
        Self { limits, by_request: HashMap::new(), streams: HashSet::new(), tokens: 0 }
    }

    /// Books a claim, or returns why not. The error of a full worker is retryable.
    pub fn book(&mut self, request: RequestId, claim: Claim<T>) -> Result<(), RequestError> {
        let wanted = self.tokens + u64::from(claim.tokens);
        let exceeds = |times: usize| {
            self.by_request.len() >= times * self.limits.claims_max
                || (wanted > times as u64 * self.limits.tokens_max && !self.by_request.is_empty())
        };
        if exceeds(1) && (exceeds(2) || !self.is_within_share(&claim)) {
            // The client reads it: no word of what other tenants have here.
            let full = RequestError::new(ErrorKind::Overloaded, "as many claims as it takes wait for their KV already");
            return Err(full.retry_after(Duration::from_millis(500)));
        }
        if !self.streams.insert(request.clone()) {
            return Err(RequestError::invalid("request_id", format!("request {request} is running here already")));
        }
        self.tokens = wanted;
        self.by_request.insert(request, claim);
        Ok(())
    }

    /// Whether a tenant is below its share of all claims, counting this claim.
    fn is_within_share(&self, claim: &Claim<T>) -> bool {
        let have = |of: fn(&Claim<T>) -> u64| self.by_request.values().map(move |claim| (claim.share, of(claim)));
        is_within(have(|_| 1), claim.share, 1, self.limits.claims_max as u64)
            && is_within(have(|of| of.tokens.into()), claim.share, claim.tokens.into(), self.limits.tokens_max)
    }

    /// The claim that matches an offer of `source` to send KV of this many tokens. Each claim has at most one offer.
    pub fn offered(&mut self, request: &RequestId, source: &Party, tokens: u32) -> Result<&Claim<T>, OfferError> {
        let Some(claim) = self.by_request.get_mut(request) else {
            return Err(OfferError::NotClaimed(format!("no claim stands for request {request}")));
        };
        let is_older = seeded!(OlderIncarnation) && claim.source.instance == source.instance;
        if claim.source != *source && !is_older {
            let message = format!("request {request} is claimed for {}, not for {source}", claim.source);
            return Err(OfferError::NotClaimed(message));
        }
        if claim.tokens != tokens {
            let message = format!("the claim is over {} tokens, the offer over {tokens}", claim.tokens);
            return Err(OfferError::Contradicts(message));
        }
        if std::mem::replace(&mut claim.offered, true) {
            return Err(OfferError::Contradicts(format!("request {request} had its offer already")));
        }
        Ok(claim)
    }

    /// Whether a request is claimed for another source than this one.
    pub fn is_of_another(&self, request: &RequestId, source: &Party) -> bool {
        self.by_request.get(request).is_some_and(|claim| claim.source != *source)
    }

    /// Ends a claim whose stream ended, unless it was taken before.
    pub fn end(&mut self, request: &RequestId) -> Option<Claim<T>> {
        self.streams.remove(request);
        self.take(request)
    }

    /// Takes out a claim that was adopted or failed. Its id stays in use until its stream ends.
    pub fn take(&mut self, request: &RequestId) -> Option<Claim<T>> {
        let claim = self.by_request.remove(request)?;
        self.tokens -= u64::from(claim.tokens);
        Some(claim)
    }

    /// Tokens of a request's claim; 0 without one.
    pub fn tokens_of(&self, request: &RequestId) -> u32 {
        self.by_request.get(request).map_or(0, |claim| claim.tokens)
    }

    /// Sum of the tokens of all claims.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of claims, with or without an offer.
    pub fn len(&self) -> usize {
        self.by_request.len()
    }

    /// Whether streams are open, of claims that were taken or not.
    pub fn has_streams(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{Incarnation, InstanceId, TenantLabel, Weight};

    fn claim(tokens: u32) -> Claim<()> {
        of(0, tokens)
    }

    /// One claim of a tenant.
    fn of(tenant: u64, tokens: u32) -> Claim<()> {
        let share = Share { tenant: TenantLabel(tenant), weight: Weight::default() };
        Claim { source: party("p", 1), tokens, share, offered: false, stream: () }
    }

    fn party(name: &str, incarnation: u64) -> Party {
        Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(incarnation) }
    }

    fn id(name: &str) -> RequestId {
        RequestId::try_new(name).unwrap()
    }

    #[test]
    fn claims_are_bounded_in_number_and_tokens() {
        let mut claims = Claims::new(ClaimLimits { claims_max: 3, tokens_max: 100 });
        claims.book(id("a"), claim(90)).unwrap();
        let full = claims.book(id("b"), claim(11)).unwrap_err();
        assert_eq!((full.kind, full.retry_after.is_some()), (ErrorKind::Overloaded, true));
        assert_eq!(claims.book(id("a"), claim(1)).unwrap_err().kind, ErrorKind::InvalidRequest);
        claims.book(id("b"), claim(5)).unwrap();
        claims.book(id("c"), claim(5)).unwrap();
        assert_eq!(claims.book(id("d"), claim(0)).unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!((claims.len(), claims.tokens()), (3, 100));
        assert!(claims.take(&id("a")).is_some() && claims.take(&id("a")).is_none());
        assert_eq!((claims.len(), claims.tokens()), (2, 10));
        assert_eq!(claims.book(id("a"), claim(1)).unwrap_err().kind, ErrorKind::InvalidRequest, "its stream is open");
        claims.end(&id("a"));
        claims.book(id("a"), claim(1)).unwrap();
        claims.end(&id("a"));
        assert_eq!((claims.len(), claims.tokens()), (2, 10));
    }

    #[test]
    fn only_the_offer_that_was_claimed_is_taken_and_only_once() {
        let mut claims = Claims::new(ClaimLimits { claims_max: 3, tokens_max: 100 });
        claims.book(id("a"), claim(5)).unwrap();
        let cases = [
            ("b", party("p", 1), 5, Some("no claim stands")),
            ("a", party("q", 1), 5, Some("is claimed for")),
            ("a", party("p", 2), 5, Some("is claimed for")),
            ("a", party("p", 1), 6, Some("over 5 tokens, the offer over 6")),
            ("a", party("p", 1), 5, None),
            ("a", party("p", 1), 5, Some("had its offer")),
        ];
        for (request, source, tokens, refused) in cases {
            let got = claims.offered(&id(request), &source, tokens).err().map(|e| e.to_string());
            let expected = refused.unwrap_or_default();
            assert!(got.is_some() == refused.is_some() && got.unwrap_or_default().contains(expected), "{expected:?}");
        }
        assert_eq!(claims.len(), 1);
    }

    #[test]
    fn one_below_its_share_does_not_find_all_claimed_by_others() {
        let mut claims = Claims::new(ClaimLimits { claims_max: 4, tokens_max: 100 });
        (0..4).for_each(|n| claims.book(id(&format!("a{n}")), of(1, 25)).unwrap());
        assert!(claims.book(id("a4"), of(1, 1)).is_err());
        claims.book(id("b0"), of(2, 40)).unwrap();
        assert!(claims.book(id("b1"), of(2, 11)).is_err(), "half of the tokens are its share");
        claims.book(id("b1"), of(2, 10)).unwrap();
        assert!(claims.book(id("b2"), of(2, 0)).is_err(), "and half of the claims");
        claims.book(id("c0"), of(3, 50)).unwrap();
        assert!(claims.book(id("d0"), of(4, 1)).is_err(), "twice the tokens are claimed");
        assert_eq!((claims.len(), claims.tokens()), (7, 200));
    }

    #[test]
    fn a_claim_larger_than_the_bound_is_taken_alone() {
        let mut claims = Claims::new(ClaimLimits { claims_max: 3, tokens_max: 100 });
        claims.book(id("a"), claim(150)).unwrap();
        assert!(claims.book(id("b"), claim(1)).is_err());
    }
}
