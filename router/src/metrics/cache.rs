//! Savings by prefix caches, by model and tenant, and the cost of requests.
//!
//! Series of tenants are shown only to readers who may see all of them: metrics on the clients' port reveal nothing
//! about a tenant. The keys file may hold thousands of tenants, so the first ones have their own series. The others
//! share one with an empty name, which no tenant has.

use super::window::HitWindow;
use crate::prices::Cost;
use baton_types::{TenantId, Usage};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Most tenants with series of their own, for each model.
const TENANTS_MAX: usize = 256;
/// The tenant label of the shared series.
const OTHERS: &str = "";

/// What is counted for one model.
#[derive(Debug, Default)]
struct OfModel {
    cache_write: u64,
    recomputed: u64,
    tenants: BTreeMap<String, OfTenant>,
}

#[derive(Debug)]
struct OfTenant {
    prompt: u64,
    cached: u64,
    recent: HitWindow,
    /// Cost in the router's only currency.
    cost: Option<(String, f64)>,
}

/// Metrics of prefix caches, as a router sees them. Clones count together.
#[derive(Clone, Debug)]
pub(crate) struct CacheMetrics {
    /// Whether anything is shown: a tenant that sees the sum and knows its own part could compute that of the others.
    shown: bool,
    models: Arc<Mutex<BTreeMap<String, OfModel>>>,
}

impl CacheMetrics {
    /// `shown`: whether the counts are exported.
    pub(crate) fn new(shown: bool) -> Self {
        Self { shown, models: Arc::default() }
    }

    /// Counts a request that had its first token. The model name comes from the workers.
    pub(crate) fn ended(&self, model: &str, tenant: &TenantId, usage: &Usage, cost: Option<&Cost>, now: Instant) {
        let mut models = self.models.lock();
        let model = models.entry(model.to_owned()).or_default();
        model.cache_write += u64::from(usage.cache_write_tokens);
        model.recomputed += u64::from(usage.recomputed_tokens);
        let known = model.tenants.contains_key(tenant.as_str()) || model.tenants.len() < TENANTS_MAX;
        let tenant = if known { tenant.as_str() } else { OTHERS };
        let new = || OfTenant { prompt: 0, cached: 0, recent: HitWindow::new(now), cost: None };
        let of = model.tenants.entry(tenant.to_owned()).or_insert_with(new);
        let (prompt, cached) = (u64::from(usage.prompt_tokens), u64::from(usage.cached_tokens));
        of.prompt += prompt;
        of.cached += cached;
        of.recent.add(prompt, cached, now);
        if let Some(cost) = cost {
            of.cost.get_or_insert_with(|| (cost.currency.clone(), 0.0)).1 += cost.amount;
        }
    }
}

/// One family, its series given as labels and values.
fn family<'a, M: EncodeMetric + TypedMetric>(
    to: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    series: impl Iterator<Item = (Vec<(&'a str, &'a str)>, M)>,
) -> fmt::Result {
    let mut family = to.encode_descriptor(name, help, None, M::TYPE)?;
    for (labels, metric) in series {
        metric.encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

impl CacheMetrics {
    fn encode_at(&self, to: &mut DescriptorEncoder<'_>, now: Instant) -> fmt::Result {
        let mut models = self.models.lock();
        let ratios: Vec<(String, String, f64)> = models
            .iter_mut()
            .flat_map(|(model, of)| of.tenants.iter_mut().map(move |(tenant, of)| (model, tenant, of)))
            .filter_map(|(model, tenant, of)| Some((model.clone(), tenant.clone(), of.recent.ratio(now)?)))
            .collect();
        let models = &*models;
        let all = || models.iter().map(|(model, of)| (model.as_str(), of));
        let by_tenant = |count: fn(&OfTenant) -> u64| {
            all().flat_map(move |(model, of)| {
                let labels = move |tenant| vec![("model", model), ("tenant", tenant)];
                of.tenants.iter().map(move |(tenant, of)| (labels(tenant.as_str()), ConstCounter::new(count(of))))
            })
        };
        let by_model = |count: fn(&OfModel) -> u64| {
            all().map(move |(model, of)| (vec![("model", model)], ConstCounter::new(count(of))))
        };
        family(to, "prompt_tokens", "Tokens of prompts whose first token was made", by_tenant(|of| of.prompt))?;
        family(to, "cached_tokens", "Those of them whose KV was cached", by_tenant(|of| of.cached))?;
        family(
            to,
            "cache_write_tokens",
            "Those of them whose KV was computed and left in a prefix cache",
            by_model(|of| of.cache_write),
        )?;
        family(
            to,
            "recomputed_tokens",
            "Tokens that were computed once more, since a request went on elsewhere",
            by_model(|of| of.recomputed),
        )?;
        let ratios = ratios.iter().map(|(model, tenant, ratio)| {
            let labels = vec![("model", model.as_str()), ("tenant", tenant.as_str()), ("window", "24h")];
            (labels, ConstGauge::new(*ratio))
        });
        family(to, "cache_hit_ratio", "Cached share of the tokens of prompts in the window, 0 to 1", ratios)?;
        let costs = all().flat_map(|(model, of)| {
            of.tenants.iter().filter_map(move |(tenant, of)| {
                let (currency, cost) = of.cost.as_ref()?;
                let labels = vec![("model", model), ("tenant", tenant.as_str()), ("currency", currency.as_str())];
                Some((labels, ConstCounter::new(*cost)))
            })
        });
        family(to, "cost", "What requests cost, where their model has a price", costs)
    }
}

impl Collector for CacheMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        if self.shown { self.encode_at(&mut to, Instant::now()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::registry::Registry;

    fn tenant(name: &str) -> TenantId {
        TenantId::try_new(name).unwrap()
    }

    fn shown(metrics: &CacheMetrics) -> Vec<String> {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(metrics.clone()));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text.lines().filter(|line| !line.starts_with('#')).map(String::from).collect()
    }

    fn usage(prompt_tokens: u32, cached_tokens: u32) -> Usage {
        Usage { prompt_tokens, cached_tokens, cache_write_tokens: 3, recomputed_tokens: 2, completion_tokens: 9 }
    }

    #[test]
    fn tenants_are_counted_apart() {
        let (metrics, now) = (CacheMetrics::new(true), Instant::now());
        let cost = Cost { amount: 0.25, currency: "EUR".into() };
        metrics.ended("m", &tenant("alice"), &usage(10, 5), Some(&cost), now);
        metrics.ended("m", &tenant("alice"), &usage(10, 10), Some(&cost), now);
        metrics.ended("m", &tenant("bob"), &usage(8, 0), None, now);
        expect_test::expect![[r#"
            prompt_tokens_total{model="m",tenant="alice"} 20
            prompt_tokens_total{model="m",tenant="bob"} 8
            cached_tokens_total{model="m",tenant="alice"} 15
            cached_tokens_total{model="m",tenant="bob"} 0
            cache_write_tokens_total{model="m"} 9
            recomputed_tokens_total{model="m"} 6
            cache_hit_ratio{model="m",tenant="alice",window="24h"} 0.75
            cache_hit_ratio{model="m",tenant="bob",window="24h"} 0.0
            cost_total{model="m",tenant="alice",currency="EUR"} 0.5"#]]
        .assert_eq(&shown(&metrics).join("\n"));
    }

    #[test]
    fn where_tenants_read_metrics_nothing_is_shown() {
        let (metrics, now) = (CacheMetrics::new(false), Instant::now());
        metrics.ended("m", &tenant("alice"), &usage(10, 5), None, now);
        assert_eq!(shown(&metrics), Vec::<String>::new());
    }

    #[test]
    fn tenants_beyond_the_bound_share_a_series() {
        let (metrics, now) = (CacheMetrics::new(true), Instant::now());
        for n in 0..TENANTS_MAX + 5 {
            metrics.ended("m", &tenant(&format!("t{n}")), &usage(1, 0), None, now);
        }
        metrics.ended("m", &tenant("t0"), &usage(1, 0), None, now);
        let shown: Vec<String> = shown(&metrics).into_iter().filter(|l| l.starts_with("prompt_tokens_total")).collect();
        assert_eq!(shown.len(), TENANTS_MAX + 1);
        for line in [r#"{model="m",tenant="t0"} 2"#, r#"{model="m",tenant=""} 5"#] {
            assert!(shown.iter().any(|shown| shown.ends_with(line)), "{line}: {shown:?}");
        }
    }
}
