//! Checks the cache options of a request, and resolves them into what workers receive.

use super::CacheConfig;
use super::salt::salt;
use baton_types::{CacheUse, RequestError, TenantId};
use std::fmt;
use std::time::Duration;

/// Longest `cache_salt`, in bytes.
const SALT_BYTES_MAX: usize = 256;

/// How a request asks to use prefix caches.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct CacheOptions {
    /// `cache_salt`: the request shares blocks with requests of the same salt within its tenant.
    pub salt: Option<String>,
    /// `cache.ttl_ms`: idle time after which its blocks are evicted.
    pub ttl_ms: Option<u64>,
    /// `cache.pin_ms`: how long the blocks of its prompt are kept at least.
    pub pin_ms: Option<u64>,
    /// The same as a wish, where `pin_ms` is absent: as much of it as the router allows.
    pub pin_wish_ms: Option<u64>,
    /// `cache.off`: it neither reads nor writes the cache.
    pub off: bool,
    /// `cache.cold`: no request is expected to reuse its blocks soon.
    pub cold: bool,
}

impl fmt::Debug for CacheOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { salt: _, ttl_ms, pin_ms, pin_wish_ms, off, cold } = self;
        // The salt is secret: a client that knows it can share the blocks.
        f.debug_struct("CacheOptions")
            .field("ttl_ms", ttl_ms)
            .field("pin_ms", pin_ms)
            .field("pin_wish_ms", pin_wish_ms)
            .field("off", off)
            .field("cold", cold)
            .finish_non_exhaustive()
    }
}

/// What a router allows, and its secret.
#[derive(Clone, Debug)]
pub(crate) struct CacheRules(CacheConfig);

impl CacheRules {
    /// Of a checked configuration.
    pub(crate) fn new(config: &CacheConfig) -> Self {
        Self(config.clone())
    }

    /// The cache use that workers receive for a request of `tenant`; `None` if it uses no cache. The options are
    /// checked in any case.
    pub(crate) fn resolve(&self, tenant: &TenantId, options: &CacheOptions) -> Result<Option<CacheUse>, RequestError> {
        let CacheConfig { enabled, ttl_ms, ttl_ms_max, pin_ms_max, pins, secret, index_blocks_max: _ } = &self.0;
        if options.salt.as_ref().is_some_and(|salt| salt.is_empty() || salt.len() > SALT_BYTES_MAX) {
            let message = format!("cache_salt must be 1 to {SALT_BYTES_MAX} bytes long; leave it out to have none");
            return Err(RequestError::invalid("cache_salt", message));
        }
        let within = |param: &str, asked: Option<u64>, most: u64| match asked {
            Some(asked) if asked > most => {
                let message = format!("{param} must be at most {most} here, got {asked}");
                Err(RequestError::invalid(param, message))
            }
            asked => Ok(asked),
        };
        let ttl = within("cache.ttl_ms", options.ttl_ms, *ttl_ms_max)?.or(*ttl_ms);
        if options.off && options.pin_ms.is_some_and(|ms| ms > 0) {
            let message = "cache.off keeps nothing that cache.pin_ms could keep; leave one of them out";
            return Err(RequestError::invalid("cache.pin_ms", message));
        }
        let wish = options.pin_wish_ms.map(|ms| ms.min(*pin_ms_max));
        let pin = within("cache.pin_ms", options.pin_ms, *pin_ms_max)?.or(wish.max(pins.get(tenant).copied()));
        let pin = pin.filter(|ms| *ms > 0);
        if !enabled || options.off {
            return Ok(None);
        }
        let secret = secret.as_ref().map_or("", |secret| secret.expose());
        Ok(Some(CacheUse {
            salt: salt(secret, tenant, options.salt.as_deref()),
            ttl: ttl.map(Duration::from_millis),
            pin: pin.map(Duration::from_millis),
            cold: options.cold,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(change: impl FnOnce(&mut CacheConfig)) -> CacheRules {
        let mut config = CacheConfig { ttl_ms_max: 1_000, pin_ms_max: 500, ..CacheConfig::default() };
        change(&mut config);
        CacheRules::new(&config)
    }

    fn alice() -> TenantId {
        TenantId::try_new("alice").unwrap()
    }

    #[test]
    fn a_request_narrows_and_never_widens_what_is_shared() {
        let (rules, bob) = (rules(|_| ()), TenantId::try_new("bob").unwrap());
        let salt = |tenant: &TenantId, salt: Option<&str>| {
            let options = CacheOptions { salt: salt.map(Into::into), ..CacheOptions::default() };
            rules.resolve(tenant, &options).unwrap().unwrap().salt
        };
        assert_eq!(salt(&alice(), None), salt(&alice(), None));
        assert_eq!(salt(&alice(), Some("s")), salt(&alice(), Some("s")));
        assert_ne!(salt(&alice(), Some("s")), salt(&alice(), None), "narrower");
        for of_bob in [None, Some("s"), Some("alice"), Some("bob")] {
            for of_alice in [None, Some("s"), Some("alice"), Some("bob")] {
                assert_ne!(salt(&alice(), of_alice), salt(&bob, of_bob), "{of_alice:?} {of_bob:?}");
            }
        }
    }

    #[test]
    fn a_wish_is_granted_as_far_as_pins_are_allowed() {
        let pin = |pin_ms_max, of_alice: u64, pin_ms, wish, off| {
            let rules = rules(|c| {
                c.pin_ms_max = pin_ms_max;
                c.pins = (of_alice > 0).then(|| (alice(), of_alice)).into_iter().collect();
            });
            let options = CacheOptions { pin_ms, pin_wish_ms: Some(wish), off, ..CacheOptions::default() };
            rules.resolve(&alice(), &options).unwrap().and_then(|used| used.pin).map(|pin| pin.as_millis())
        };
        assert_eq!(pin(500, 0, None, 400, false), Some(400));
        assert_eq!(pin(500, 0, None, 600, false), Some(500));
        assert_eq!(pin(0, 0, None, 600, false), None, "no permission, and no error");
        assert_eq!(pin(0, 300, None, 600, false), Some(300), "the tenant's own");
        assert_eq!(pin(500, 300, None, 200, false), Some(300));
        assert_eq!(pin(500, 300, Some(0), 200, false), None, "what is said in milliseconds wins");
        assert_eq!(pin(500, 300, None, 200, true), None);
    }

    #[test]
    fn times_are_the_requests_within_the_routers_bounds() {
        let times = |rules: &CacheRules, ttl_ms, pin_ms| {
            let options = CacheOptions { ttl_ms, pin_ms, ..CacheOptions::default() };
            let used = rules.resolve(&alice(), &options).map_err(|e| (e.param.unwrap(), e.message))?.unwrap();
            Ok((used.ttl.map(|t| t.as_millis()), used.pin.map(|t| t.as_millis())))
        };
        let plain = rules(|_| ());
        assert_eq!(times(&plain, None, None), Ok((None, None)), "the worker's own");
        assert_eq!(times(&plain, Some(1_000), Some(500)), Ok((Some(1_000), Some(500))));
        assert_eq!(times(&plain, Some(0), Some(0)), Ok((Some(0), None)));
        for (ttl, pin, param, most) in [
            (Some(1_001), None, "cache.ttl_ms", "at most 1000 here, got 1001"),
            (None, Some(501), "cache.pin_ms", "at most 500 here, got 501"),
        ] {
            let (named, message) = times(&plain, ttl, pin).unwrap_err();
            assert!(named == param && message.contains(most), "{named}: {message}");
        }
        // The limit for requests does not apply to the operator's own default.
        let long = rules(|c| c.ttl_ms = Some(5_000));
        assert_eq!(times(&long, None, None), Ok((Some(5_000), None)));
        assert_eq!(times(&long, Some(9), None), Ok((Some(9), None)));
        // Nor to a tenant's own pin, which a request may shorten or turn off.
        let pinned = rules(|c| c.pins = [(alice(), 9_000)].into());
        for (asked, pin) in [(None, Some(9_000)), (Some(5), Some(5)), (Some(0), None)] {
            assert_eq!(times(&pinned, None, asked), Ok((None, pin)));
        }
        let others = rules(|c| c.pins = [(TenantId::try_new("bob").unwrap(), 9_000)].into());
        assert_eq!(times(&others, None, None), Ok((None, None)));
    }

    #[test]
    fn what_is_off_is_checked_all_the_same() {
        let off = CacheOptions { off: true, ..CacheOptions::default() };
        assert_eq!(rules(|_| ()).resolve(&alice(), &off), Ok(None));
        assert_eq!(rules(|c| c.enabled = false).resolve(&alice(), &CacheOptions::default()), Ok(None));
        for salt in [String::new(), "x".repeat(257)] {
            let options = CacheOptions { salt: Some(salt), ..off.clone() };
            let error = rules(|c| c.enabled = false).resolve(&alice(), &options).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("cache_salt"));
            assert!(error.message.contains("1 to 256 bytes"), "{error}");
        }
        let pinned = CacheOptions { pin_ms: Some(1), ..off };
        let error = rules(|_| ()).resolve(&alice(), &pinned).unwrap_err();
        assert!(error.message.contains("leave one of them out"), "{error}");
        let pinned = CacheOptions { off: false, ..pinned };
        let nobody = CacheRules::new(&CacheConfig { enabled: false, ..CacheConfig::default() });
        assert!(nobody.resolve(&alice(), &pinned).is_err(), "nobody may pin unless told");
    }

    #[test]
    fn salts_are_not_printed() {
        let options = CacheOptions { salt: Some("hush".into()), ..CacheOptions::default() };
        assert!(!format!("{options:?}").contains("hush"));
    }
}
