//! Exact probabilities of the next token, in f64 and by the formulas of the papers: every stage is normalized.

use crate::sampling::History;
use baton_types::{SamplingParams, TokenId};

/// Of each token, 0 for those that are not drawn: with bias, penalties and barred tokens.
pub(super) fn probabilities(
    params: &SamplingParams,
    logits: &[f32],
    history: &History,
    bias: &[(TokenId, f32)],
    barred: &[TokenId],
) -> Vec<f64> {
    let mut logits: Vec<f64> = logits.iter().map(|logit| f64::from(*logit)).collect();
    for (token, bias) in bias {
        logits[*token as usize] += f64::from(*bias);
    }
    for (token, logit) in logits.iter_mut().enumerate() {
        let (factor, token) = (f64::from(params.repetition_penalty), token as TokenId);
        if history.contains(token) {
            *logit = if *logit > 0.0 { *logit / factor } else { *logit * factor };
        }
        let count = history.generated(token);
        if count > 0 {
            *logit -= f64::from(params.frequency_penalty) * f64::from(count) + f64::from(params.presence_penalty);
        }
    }
    barred.iter().for_each(|token| logits[*token as usize] = f64::NEG_INFINITY);
    filtered(params, logits)
}

/// Temperature, then the filters.
pub(super) fn filtered(params: &SamplingParams, logits: Vec<f64>) -> Vec<f64> {
    let normalize = |tokens: &mut Vec<(usize, f64)>| {
        let sum: f64 = tokens.iter().map(|(_, p)| p).sum();
        tokens.iter_mut().for_each(|(_, p)| *p /= sum);
    };
    let vocab = logits.len();
    let scaled = |l: f64| (l / f64::from(params.temperature)).exp();
    let mut tokens: Vec<_> = logits.into_iter().map(scaled).enumerate().collect();
    normalize(&mut tokens);
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let least = f64::from(params.min_p) * tokens[0].1;
    tokens.retain(|(_, p)| *p >= least);
    normalize(&mut tokens);
    if params.top_k != 0 {
        tokens.truncate(params.top_k as usize);
        normalize(&mut tokens);
    }
    let shortest = |tokens: &mut Vec<(usize, f64)>, enough: f32| {
        let mut before = 0.0;
        tokens.retain(|(_, p)| {
            let keep = before < f64::from(enough);
            before += p;
            keep
        });
        normalize(tokens);
    };
    if params.top_p < 1.0 {
        shortest(&mut tokens, params.top_p);
    }
    if params.typical_p < 1.0 {
        tokens.retain(|(_, p)| *p > 0.0);
        let entropy: f64 = tokens.iter().map(|(_, p)| -p * p.ln()).sum();
        let distance = |p: f64| (-p.ln() - entropy).abs();
        tokens.sort_by(|a, b| distance(a.1).total_cmp(&distance(b.1)).then(a.0.cmp(&b.0)));
        shortest(&mut tokens, params.typical_p);
    }
    let mut probabilities = vec![0.0; vocab];
    tokens.into_iter().for_each(|(token, p)| probabilities[token] = p);
    probabilities
}
