//! Claims: capacity that a router has booked here for sequences whose KV is still to come. Pure.
//!
//! A claim holds no blocks. It bounds how much may be on its way, names who may turn it into a reservation, and ends with the stream
//! that booked it.

use baton_types::{ErrorKind, Party, RequestError, RequestId};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Bounds of a [`Claims`].
#[derive(Clone, Copy, Debug)]
pub struct ClaimLimits {
    /// Most claims at once.
    pub claims_max: usize,
    /// Most tokens claimed at once: what is claimed beyond the pool can only wait.
    pub tokens_max: u64,
}

/// One booked claim with what its stream needs, `T`.
#[derive(Debug)]
pub struct Claim<T> {
    /// Only this instance, in this incarnation, may reserve.
    pub source: Party,
    /// Positions whose KV will come.
    pub tokens: u32,
    /// When it lapses.
    pub deadline: Instant,
    /// The stream's part.
    pub stream: T,
}

/// All claims of a decode worker.
#[derive(Debug)]
pub struct Claims<T> {
    limits: ClaimLimits,
    by_request: HashMap<RequestId, Claim<T>>,
    tokens: u64,
}

impl<T> Claims<T> {
    /// No claims yet.
    pub fn new(limits: ClaimLimits) -> Self {
        Self { limits, by_request: HashMap::new(), tokens: 0 }
    }

    /// Books a claim, or says why not. A full worker asks to be retried.
    pub fn book(&mut self, request: RequestId, claim: Claim<T>) -> Result<(), RequestError> {
        let wanted = self.tokens + u64::from(claim.tokens);
        if self.by_request.len() >= self.limits.claims_max
            || (wanted > self.limits.tokens_max && !self.by_request.is_empty())
        {
            let message =
                format!("{} claims over {} tokens wait for their KV already", self.by_request.len(), self.tokens);
            return Err(RequestError::new(ErrorKind::Overloaded, message).retry_after(Duration::from_millis(500)));
        }
        if self.by_request.contains_key(&request) {
            return Err(RequestError::invalid("request_id", format!("request {request} is running here already")));
        }
        self.tokens = wanted;
        self.by_request.insert(request, claim);
        Ok(())
    }

    /// The claim of a request.
    pub fn get(&self, request: &RequestId) -> Option<&Claim<T>> {
        self.by_request.get(request)
    }

    /// Ends a claim: adopted, failed or cancelled.
    pub fn take(&mut self, request: &RequestId) -> Option<Claim<T>> {
        let claim = self.by_request.remove(request)?;
        self.tokens -= u64::from(claim.tokens);
        Some(claim)
    }

    /// Tokens claimed.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Number of claims.
    pub fn len(&self) -> usize {
        self.by_request.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_request.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{Incarnation, InstanceId};

    fn claim(tokens: u32) -> Claim<()> {
        let source = Party { instance: InstanceId::try_new("p").unwrap(), incarnation: Incarnation(1) };
        Claim { source, tokens, deadline: Instant::now(), stream: () }
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
    }

    #[test]
    fn a_claim_larger_than_the_bound_is_taken_alone() {
        let mut claims = Claims::new(ClaimLimits { claims_max: 3, tokens_max: 100 });
        claims.book(id("a"), claim(150)).unwrap();
        assert!(claims.book(id("b"), claim(1)).is_err());
    }
}
