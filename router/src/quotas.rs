//! What each key has in flight, against its limits. Pure: no clock, no I/O.

use crate::auth::{Key, KeyId, KeyLimits};
use baton_types::{ErrorKind, RequestError};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

/// A retry hint: there is no estimate of when running requests end.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Counts of all keys with requests in flight. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Quotas(Arc<Mutex<HashMap<KeyId, InFlight>>>);

#[derive(Clone, Copy, Debug, Default)]
struct InFlight {
    requests: u64,
    tokens: u64,
}

/// One request's part of its key's quota; dropping it returns the part.
#[derive(Debug)]
pub(crate) struct Quota {
    quotas: Quotas,
    key: Option<Key>,
    has: InFlight,
}

impl Quotas {
    /// Admits a request of `samples` samples. Without a key there is no limit here.
    pub(crate) fn enter(&self, key: Option<&Key>, samples: u32, priority: i32) -> Result<Quota, RequestError> {
        let mut quota = Quota { quotas: self.clone(), key: key.copied(), has: InFlight::default() };
        if let Some(Key { limits: KeyLimits { priority_max, requests_max, .. }, .. }) = key {
            if priority > *priority_max {
                let message =
                    format!("priority {priority} is over {priority_max}, the highest that this API key may ask for");
                return Err(RequestError::invalid("priority", message));
            }
            let more = InFlight { requests: u64::from(samples), tokens: 0 };
            quota.take(more, |now| now.requests, "n", "requests", *requests_max)?;
        }
        Ok(quota)
    }
}

impl Quota {
    /// Charges the tokens of its prompt and its longest answer, once they are known.
    pub(crate) fn add_tokens(&mut self, tokens: u64) -> Result<(), RequestError> {
        let Some(Key { limits, .. }) = self.key else { return Ok(()) };
        let more = InFlight { requests: 0, tokens };
        self.take(more, |now| now.tokens, "max_tokens", "tokens", limits.tokens_max)
    }

    fn take(
        &mut self,
        more: InFlight,
        of: impl Fn(&InFlight) -> u64,
        param: &str,
        what: &str,
        max: u64,
    ) -> Result<(), RequestError> {
        let Some(key) = self.key else { return Ok(()) };
        let asked = of(&more);
        if asked > max {
            let message =
                format!("this request takes {asked} {what}, and its API key may have {max} in flight; ask for less");
            return Err(RequestError::invalid(param, message));
        }
        let mut all = self.quotas.0.lock();
        let now = all.entry(key.id).or_default();
        let left = max.saturating_sub(of(now));
        if asked > left {
            let message = format!(
                "this request takes {asked} {what}, and its API key may have {left} more in flight of {max}; try again later"
            );
            return Err(RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER));
        }
        for count in [now, &mut self.has] {
            count.requests += more.requests;
            count.tokens += more.tokens;
        }
        Ok(())
    }
}

impl Drop for Quota {
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        let mut all = self.quotas.0.lock();
        let Some(now) = all.get_mut(&key.id) else { return };
        now.requests -= self.has.requests;
        now.tokens -= self.has.tokens;
        if (now.requests, now.tokens) == (0, 0) {
            all.remove(&key.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(id: u8) -> Key {
        Key { id: [id; 32], limits: KeyLimits { priority_max: 0, requests_max: 3, tokens_max: 100 } }
    }

    #[test]
    fn each_key_has_its_own_and_gets_it_back() {
        let quotas = Quotas::default();
        let enter = |id, samples| quotas.enter(Some(&key(id)), samples, 0);
        let (mut one, two) = (enter(1, 2).unwrap(), enter(1, 1).unwrap());
        let refused = enter(1, 1).unwrap_err();
        assert_eq!((refused.kind, refused.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
        let mut other = enter(2, 3).unwrap();
        one.add_tokens(90).unwrap();
        other.add_tokens(100).unwrap();
        drop(two);
        let mut three = enter(1, 1).unwrap();
        assert_eq!(three.add_tokens(11).unwrap_err().kind, ErrorKind::Overloaded);
        three.add_tokens(10).unwrap();
        drop((one, three, other));
        assert!(quotas.0.lock().is_empty());
    }

    #[test]
    fn what_never_fits_is_not_to_be_tried_again() {
        let quotas = Quotas::default();
        let refused = |samples, priority| quotas.enter(Some(&key(1)), samples, priority).map(drop).unwrap_err();
        assert_eq!((refused(4, 0).kind, refused(4, 0).param.as_deref()), (ErrorKind::InvalidRequest, Some("n")));
        assert_eq!((refused(1, 1).kind, refused(1, 1).param.as_deref()), (ErrorKind::InvalidRequest, Some("priority")));
        let long = quotas.enter(Some(&key(1)), 1, -7).unwrap().add_tokens(101).unwrap_err();
        assert_eq!((long.kind, long.param.as_deref()), (ErrorKind::InvalidRequest, Some("max_tokens")));
        assert!(quotas.0.lock().is_empty());
        quotas.enter(None, 1000, 100).unwrap().add_tokens(u64::MAX).unwrap();
    }
}
