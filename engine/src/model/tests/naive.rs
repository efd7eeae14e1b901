//! A second implementation of the decoder: dense f64, no cache, no batching, written from the formulas.

use super::delta::Delta;
use super::{Rig, Rows, random, reference, tokens};
use crate::families::{
    Activation, AttentionSpec, ExpertGroups, ExpertTensor, ExpertsSpec, LayerSpec, LayerTensor, RopeScaling, Scoring,
    TensorName,
};
use crate::formats::ModelSource;
use crate::model::inverse_frequencies;
use baton_types::{Dtype, TokenId};

pub(super) type Matrix = Vec<Vec<f64>>;

pub(super) fn matrix(model: &dyn ModelSource, name: TensorName, columns: usize) -> Matrix {
    model.tensor(name).unwrap().chunks_exact(columns).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect()
}

fn times(w: &Matrix, x: &[f64]) -> Vec<f64> {
    w.iter().map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

fn plus(x: Vec<f64>, y: &[f64]) -> Vec<f64> {
    x.iter().zip(y).map(|(a, b)| a + b).collect()
}

/// A matrix and its bias.
pub(super) struct Linear {
    matrix: Matrix,
    bias: Vec<f64>,
}

impl Linear {
    /// Without a bias it is zero.
    pub(super) fn new(model: &dyn ModelSource, name: TensorName, bias: TensorName) -> Self {
        let [rows, columns] = model.spec().tensor_dims(name);
        let bias = if model.spec().has_tensor(bias) { matrix(model, bias, rows).remove(0) } else { vec![0.0; rows] };
        Self { matrix: matrix(model, name, columns), bias }
    }

    pub(super) fn of(&self, x: &[f64]) -> Vec<f64> {
        plus(times(&self.matrix, x), &self.bias)
    }
}

pub(super) fn rms_norm(x: &[f64], gain: &Matrix, eps: f64) -> Vec<f64> {
    let mean_square = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
    x.iter().zip(&gain[0]).map(|(v, g)| v / (mean_square + eps).sqrt() * g).collect()
}

/// RMSNorm of each piece as long as the gain: of each head, or of all.
fn norm_heads(x: &mut [f64], gain: &Matrix, eps: f64) {
    for head in x.chunks_exact_mut(gain[0].len()) {
        let normed = rms_norm(head, gain, eps);
        head.copy_from_slice(&normed);
    }
}

/// Rotates the pairs `(i, i + r/2)` of `r` elements of each head by `position * theta^(-2i/r)`.
fn rotate(x: &mut [f64], position: usize, attention: &AttentionSpec) {
    let Some(rope) = &attention.rope else { return };
    let (d, r) = (attention.head_dim, rope.dim);
    let turned: Vec<f64> = match &rope.scaling {
        RopeScaling::None => (0..r / 2).map(|i| f64::from(rope.theta).powf(-2.0 * i as f64 / r as f64)).collect(),
        // Written once: what transformers recorded checks it.
        _ => inverse_frequencies(rope).unwrap(),
    };
    let amplitude = f64::from(rope.amplitude());
    for head in x.chunks_exact_mut(d) {
        // Of latents the last elements.
        let head = if attention.latent.is_some() { &mut head[d - r..] } else { head };
        for i in 0..r / 2 {
            let angle = position as f64 * turned[i];
            let (a, b) = (amplitude * head[i], amplitude * head[i + r / 2]);
            head[i] = a * angle.cos() - b * angle.sin();
            head[i + r / 2] = a * angle.sin() + b * angle.cos();
        }
    }
}

/// `cap * tanh(x / cap)`
fn capped(x: f64, cap: Option<f32>) -> f64 {
    cap.map_or(x, |cap| f64::from(cap) * (x / f64::from(cap)).tanh())
}

/// Softmax attention of the last position over `keys` and `values`, or over the window's last ones, head by head.
fn attend(
    query: &[f64],
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    attention: &AttentionSpec,
    sinks: Option<&[f64]>,
) -> Vec<f64> {
    let from = attention.window.map_or(0, |window| keys.len().saturating_sub(window as usize));
    let (keys, values) = (&keys[from..], &values[from..]);
    let (d, value_dim) = (attention.head_dim, attention.attended_dim() / attention.heads);
    let mut out = Vec::new();
    for (h, q) in query.chunks_exact(d).enumerate() {
        let kv_head = h / (attention.heads / attention.kv_heads);
        let at = kv_head * d;
        let dot = |k: &Vec<f64>| q.iter().zip(&k[at..at + d]).map(|(a, b)| a * b).sum::<f64>();
        let score = |k: &Vec<f64>| capped(dot(k) * f64::from(attention.scale), attention.soft_cap);
        let weights: Vec<f64> = keys.iter().map(|k| score(k).exp()).collect();
        let sum = weights.iter().sum::<f64>() + sinks.map_or(0.0, |sinks| sinks[h].exp());
        let value =
            |i: usize| weights.iter().zip(values).map(|(w, v)| w / sum * v[kv_head * value_dim + i]).sum::<f64>();
        out.extend((0..value_dim).map(value));
    }
    out
}

/// Queries, keys and values of a layer.
enum Projections {
    Heads {
        q: Linear,
        k: Linear,
        v: Linear,
        norms: [Option<Matrix>; 2],
    },
    /// Keys and values are multiplied out of what is compressed: nothing is absorbed.
    Latent {
        query: Vec<(Linear, Option<Matrix>)>,
        kv_down: Linear,
        kv_norm: Matrix,
        kv_up: Linear,
    },
}

impl Projections {
    fn new(model: &dyn ModelSource, l: usize) -> Self {
        use LayerTensor::{
            Key, KeyBias, KeyNorm, KvDown, KvDownNorm, KvUp, Query, QueryBias, QueryDown, QueryDownNorm, QueryNorm,
            QueryUp, Value, ValueBias,
        };
        let (spec, name) = (model.spec(), |tensor| TensorName::Layer(l, tensor));
        let linear = |tensor, bias| Linear::new(model, name(tensor), name(bias));
        let gain = |tensor| {
            let is_there = spec.has_tensor(name(tensor));
            is_there.then(|| matrix(model, name(tensor), spec.tensor_dims(name(tensor))[1]))
        };
        let Some(latent) = spec.layers[l].attention.latent else {
            let norms = [gain(QueryNorm), gain(KeyNorm)];
            return Self::Heads {
                q: linear(Query, QueryBias),
                k: linear(Key, KeyBias),
                v: linear(Value, ValueBias),
                norms,
            };
        };
        let query = match latent.query_rank {
            Some(_) => vec![(linear(QueryDown, QueryBias), gain(QueryDownNorm)), (linear(QueryUp, QueryBias), None)],
            None => vec![(linear(Query, QueryBias), None)],
        };
        let kv_norm = gain(KvDownNorm).unwrap();
        Self::Latent { query, kv_down: linear(KvDown, KeyBias), kv_norm, kv_up: linear(KvUp, KeyBias) }
    }

    fn of(&self, h: &[f64], position: usize, layer: &LayerSpec) -> [Vec<f64>; 3] {
        let (attention, eps) = (&layer.attention, f64::from(layer.rms_eps));
        let [mut q, mut k, v] = match self {
            Self::Heads { q, k, v, norms: [q_norm, k_norm] } => {
                let (mut query, mut key) = (of_query(q.of(h), attention, 0), k.of(h));
                q_norm.iter().for_each(|gain| norm_heads(&mut query, gain, eps));
                k_norm.iter().for_each(|gain| norm_heads(&mut key, gain, eps));
                [query, key, v.of(h)]
            }
            Self::Latent { query, kv_down, kv_norm, kv_up } => {
                let latent = attention.latent.unwrap();
                let eps = f64::from(latent.rms_eps);
                let q = query.iter().fold(h.to_vec(), |x, (linear, gain)| {
                    let x = linear.of(&x);
                    gain.iter().fold(x, |x, gain| rms_norm(&x, gain, eps))
                });
                let compressed = kv_down.of(h);
                let (compressed, rotated) = compressed.split_at(latent.rank);
                let up = kv_up.of(&rms_norm(compressed, kv_norm, eps));
                let plain = attention.head_dim - rotated.len();
                let (mut k, mut v) = (Vec::new(), Vec::new());
                for head in up.chunks_exact(plain + latent.value_dim) {
                    k.extend(head[..plain].iter().chain(rotated));
                    v.extend(&head[plain..]);
                }
                [q, k, v]
            }
        };
        rotate(&mut q, position, attention);
        rotate(&mut k, position, attention);
        [q, k, v]
    }
}

/// Of queries whose heads take turns with those of a gate, the queries (0) or the gate (1); queries without a gate as they are.
fn of_query(x: Vec<f64>, attention: &AttentionSpec, part: usize) -> Vec<f64> {
    match attention.output_gate {
        true => x.chunks_exact(attention.head_dim).skip(part).step_by(2).flatten().copied().collect(),
        false => x,
    }
}

/// What comes before the output matrix: attention, or a gated delta rule.
#[allow(clippy::large_enum_variant, reason = "one for each layer of a test's model")]
enum Mixer {
    Attention { project: Projections, sinks: Option<Vec<f64>>, keys: Matrix, values: Matrix },
    Delta(Box<Delta>),
}

impl Mixer {
    fn new(model: &dyn ModelSource, l: usize) -> Self {
        let layer = &model.spec().layers[l];
        if let Some(delta) = layer.delta {
            return Self::Delta(Box::new(Delta::new(model, l, delta)));
        }
        let heads = layer.attention.heads;
        let sinks = || matrix(model, TensorName::Layer(l, LayerTensor::Sinks), heads).remove(0);
        let (project, sinks) = (Projections::new(model, l), layer.attention.sinks.then(sinks));
        Self::Attention { project, sinks, keys: Vec::new(), values: Vec::new() }
    }

    /// Of the next row.
    fn of(&mut self, h: &[f64], position: usize, layer: &LayerSpec) -> Vec<f64> {
        match self {
            Self::Delta(delta) => delta.of(h),
            Self::Attention { project, sinks, keys, values } => {
                let [q, k, v] = project.of(h, position, layer);
                keys.push(k);
                values.push(v);
                let attended = attend(&q, keys, values, &layer.attention, sinks.as_deref());
                match project {
                    Projections::Heads { q, .. } if layer.attention.output_gate => {
                        let gate = of_query(q.of(h), &layer.attention, 1);
                        attended.iter().zip(gate).map(|(x, gate)| x / (1.0 + (-gate).exp())).collect()
                    }
                    _ => attended,
                }
            }
        }
    }
}

/// Which experts a row uses, and their shares; one MLP counts as an expert.
fn shares(router: &Option<(ExpertsSpec, Linear, Vec<f64>)>, h: &[f64]) -> Vec<(usize, f64)> {
    let Some((ExpertsSpec { choice, .. }, router, bias)) = router else { return vec![(0, 1.0)] };
    let logits = router.of(h);
    let scores: Vec<f64> = match choice.scoring {
        Scoring::Softmax => {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            logits.iter().map(|x| x.exp() / sum).collect()
        }
        Scoring::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
    };
    let by = plus(scores.clone(), bias);
    let descending = |by: &[f64], mut order: Vec<usize>| {
        order.sort_by(|a, b| by[*b].total_cmp(&by[*a]));
        order
    };
    let mut order: Vec<usize> = (0..by.len()).collect();
    if let Some(ExpertGroups { count, used, best }) = choice.groups {
        let size = by.len() / count;
        let total = |group: usize| -> f64 {
            let members = descending(&by, (group * size..(group + 1) * size).collect());
            members[..best].iter().map(|expert| by[*expert]).sum()
        };
        let totals: Vec<f64> = (0..count).map(total).collect();
        let groups = descending(&totals, (0..count).collect());
        order.retain(|expert| groups[..used].contains(&(expert / size)));
    }
    let mut order = descending(&by, order);
    order.truncate(choice.used);
    let of = if choice.renormalize { order.iter().map(|e| scores[*e]).sum::<f64>() } else { 1.0 };
    order.into_iter().map(|expert| (expert, scores[expert] / of * f64::from(choice.factor))).collect()
}

/// Logits of every position.
pub(super) fn forward(model: &dyn ModelSource, ids: &[TokenId]) -> Matrix {
    let (spec, hidden) = (model.spec(), model.spec().hidden);
    let embedding = matrix(model, TensorName::Embedding, hidden);
    let embed = |id: TokenId| embedding[id as usize].iter().map(|x| x * f64::from(spec.embedding_factor)).collect();
    let mut x: Matrix = ids.iter().map(|&id| embed(id)).collect();
    for (l, layer) in spec.layers.iter().enumerate() {
        let LayerSpec { activation, rms_eps, residual_factor, .. } = layer;
        let (eps, factor) = (f64::from(*rms_eps), f64::from(*residual_factor));
        let w = |tensor, columns| matrix(model, TensorName::Layer(l, tensor), columns);
        let norm_of = |tensor| layer.has_tensor(tensor).then(|| w(tensor, hidden));
        let normed = |x: &[f64], gain: &Option<Matrix>| match gain {
            Some(gain) => rms_norm(x, gain, eps),
            None => x.to_vec(),
        };
        let (input_norm, attended_norm) =
            (norm_of(LayerTensor::AttentionNorm), norm_of(LayerTensor::AttentionOutputNorm));
        let linear = |tensor, bias| Linear::new(model, TensorName::Layer(l, tensor), TensorName::Layer(l, bias));
        let mut mixer = Mixer::new(model, l);
        let output = if layer.delta.is_some() { LayerTensor::DeltaOutput } else { LayerTensor::AttentionOutput };
        let wo = linear(output, LayerTensor::AttentionOutputBias);
        let (mlp_norm, inner_norm) = (norm_of(LayerTensor::MlpNorm), norm_of(LayerTensor::MlpOutputNorm));
        let experts: Vec<[Linear; 3]> = match layer.experts {
            // MLPs have no biases.
            None => vec![
                [LayerTensor::Gate, LayerTensor::Up, LayerTensor::Down]
                    .map(|tensor| linear(tensor, LayerTensor::RouterBias)),
            ],
            Some(ExpertsSpec { count, .. }) => {
                let of = |expert| {
                    use ExpertTensor::{Down, DownBias, Gate, GateBias, Up, UpBias};
                    [(Gate, GateBias), (Up, UpBias), (Down, DownBias)].map(|(tensor, bias)| {
                        Linear::new(model, TensorName::Expert(l, expert, tensor), TensorName::Expert(l, expert, bias))
                    })
                };
                (0..count).map(of).collect()
            }
        };
        let router = layer.experts.map(|of| {
            let bias = match of.choice_bias {
                true => w(LayerTensor::ChoiceBias, of.count).remove(0),
                false => vec![0.0; of.count],
            };
            (of, linear(LayerTensor::Router, LayerTensor::RouterBias), bias)
        });
        let shared = layer.has_tensor(LayerTensor::SharedGate).then(|| {
            [LayerTensor::SharedGate, LayerTensor::SharedUp, LayerTensor::SharedDown]
                .map(|tensor| linear(tensor, LayerTensor::RouterBias))
        });
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let gated = |g: f64, u: f64| match activation {
            Activation::Silu => g * sigmoid(g) * u,
            Activation::GeluTanh => {
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                g / 2.0 * (1.0 + inner.tanh()) * u
            }
            Activation::ClampedSwiglu { alpha, limit } => {
                let (g, limit) = (g.min(f64::from(*limit)), f64::from(*limit));
                g * sigmoid(f64::from(*alpha) * g) * (u.clamp(-limit, limit) + 1.0)
            }
        };
        for (position, x) in x.iter_mut().enumerate() {
            let h = normed(x, &input_norm);
            let attended = wo.of(&mixer.of(&h, position, layer));
            x.iter_mut().zip(normed(&attended, &attended_norm)).for_each(|(x, a)| *x += factor * a);
            let h = normed(x, &mlp_norm);
            let mut sum = vec![0.0; hidden];
            let used = shares(&router, &h).into_iter().map(|(expert, share)| (&experts[expert], share));
            for ([gate, up, down], share) in used.chain(shared.iter().map(|shared| (shared, 1.0))) {
                let inner: Vec<f64> = gate.of(&h).iter().zip(up.of(&h)).map(|(&g, u)| gated(g, u)).collect();
                sum.iter_mut().zip(down.of(&inner)).for_each(|(sum, y)| *sum += share * y);
            }
            let added = normed(&sum, &inner_norm);
            x.iter_mut().zip(added).for_each(|(x, m)| *x += factor * m);
        }
    }
    let final_norm = matrix(model, TensorName::FinalNorm, hidden);
    let eps = f64::from(spec.final_rms_eps);
    let output = if spec.tied { embedding } else { matrix(model, TensorName::Output, hidden) };
    let logit = |x: f64| capped(x * f64::from(spec.logit_factor), spec.logit_soft_cap);
    x.iter().map(|x| times(&output, &rms_norm(x, &final_norm, eps)).into_iter().map(logit).collect()).collect()
}

/// Largest difference of the forward pass, with everything in `dtype`, to the naive decoder.
fn largest_difference(source: &dyn ModelSource, dtype: Dtype) -> f64 {
    let ids: Vec<TokenId> = tokens(70).into_iter().map(|id| id % source.spec().vocab as TokenId).collect();
    let expected = forward(source, &ids);
    let mut rig = Rig::new(source, &*reference(dtype), dtype, 16);
    let logits = rig.step(&[Rows { sequence: 0, from: 0, to: ids.len() }], &ids);
    let spread = expected.iter().flatten().fold(0.0f64, |m, x| m.max(x.abs()));
    assert!(spread > 1.0, "logits of {spread} would hide errors");
    let row = |i: usize| logits.row(i).iter().zip(&expected[i]).map(|(a, b)| (f64::from(*a) - b).abs());
    (0..ids.len()).flat_map(row).fold(0.0, f64::max)
}

/// The forward pass of `source` is the naive decoder up to rounding.
pub(super) fn check_forward_pass(source: &dyn ModelSource) {
    let name = source.name();
    // f32 has 24 bits: some hundred roundings on logits of a few units.
    let difference = largest_difference(source, Dtype::F32);
    assert!(difference < 2e-5, "{name}: {difference}");
    // bf16 has 8 bits: a large error, but the same function. It must exceed f32's difference, or the format was not used.
    let difference = largest_difference(source, Dtype::Bf16);
    assert!((1e-3..0.15).contains(&difference), "{name} in bf16: {difference}");
}

#[test]
fn the_forward_pass_is_the_formula() {
    for spec in [
        "random:hidden=48,layers=3,heads=4,kv_heads=4,head_dim=12,ffn=72,vocab=131",
        "random:hidden=50,layers=2,heads=6,kv_heads=2,head_dim=10,ffn=70,vocab=131,tied=true",
        "random:hidden=40,layers=2,heads=5,kv_heads=1,head_dim=16,ffn=36,vocab=131,theta=500000",
        "random:hidden=48,layers=3,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,window=7,bias=true,qk_norm=heads",
        "random:hidden=48,layers=4,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,window=20,full_every=2",
        "random:hidden=48,layers=4,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,nope_every=2",
        "random:hidden=48,layers=3,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,norms=behind,qk_norm=all,rope_dim=8",
        "random:hidden=48,layers=2,heads=4,kv_heads=1,head_dim=12,ffn=72,vocab=131,norms=both,gelu=true,soft_cap=4,tied=true",
        "random:hidden=48,layers=3,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,factor=0.7,window=9,full_every=3",
        "random:hidden=48,layers=3,heads=4,kv_heads=2,head_dim=12,ffn=24,vocab=131,experts=3,used=3",
        "random:hidden=48,layers=4,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,window=9,full_every=2,sinks=true,biases=true,clamp=1",
        "random:hidden=48,layers=2,heads=4,kv_heads=2,head_dim=12,ffn=24,vocab=131,experts=3,used=3,sinks=true,biases=true,clamp=1",
        "random:hidden=48,layers=4,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131,window=9,full_every=2,full_head_dim=20,full_kv_heads=1",
        "random:hidden=48,layers=3,heads=4,head_dim=20,rope_dim=8,latent=24,value_dim=14,ffn=72,vocab=131",
        "random:hidden=48,layers=3,heads=3,head_dim=12,rope_dim=4,latent=33,query_rank=19,value_dim=40,ffn=72,vocab=131,sinks=true",
        "random:hidden=48,layers=3,heads=4,head_dim=20,rope_dim=8,latent=24,ffn=24,vocab=131,window=9,full_every=2,experts=3,used=3,shared=20,dense=1",
        "random:hidden=48,layers=2,heads=4,head_dim=20,rope_dim=8,latent=24,ffn=24,vocab=131,experts=4,used=4,sigmoid=true,shared=20",
        "random:hidden=48,layers=3,heads=4,kv_heads=2,head_dim=12,rope_dim=6,ffn=72,vocab=131,qk_norm=heads,gate=true",
    ] {
        check_forward_pass(&random(spec));
    }
}

/// In bf16 some tokens would use other experts than in f64, since which ones is decided by a comparison.
#[test]
fn experts_are_chosen_as_the_formula_says() {
    for more in [
        "",
        ",sigmoid=true",
        ",groups=3,groups_used=2",
        ",sigmoid=true,groups=2",
        ",sigmoid=true,groups=3,groups_used=2",
    ] {
        let shape = "random:hidden=48,layers=3,heads=4,kv_heads=2,head_dim=12,ffn=24,vocab=131,experts=6,used=2";
        let difference = largest_difference(&random(&format!("{shape}{more}")), Dtype::F32);
        assert!(difference < 2e-5, "{more}: {difference}");
    }
}

/// In bf16 they are another function: the norm of what a head attended divides by a length that may be near zero, as where the first query and key
/// are nearly orthogonal. Rounding of f32 grows there too.
#[test]
fn recurrent_layers_are_the_formula() {
    for more in [
        "layers=4,rope_dim=6,qk_norm=heads,gate=true,delta=6,delta_keys=2,delta_key_dim=10,delta_dim=14",
        "layers=3,gate=true,delta=3,delta_dim=9,taps=2,attention_every=2,norms=both",
        "layers=2,delta=3,delta_key_dim=12,delta_dim=20,taps=8,bias=true,tied=true",
    ] {
        let shape = "random:hidden=48,heads=4,kv_heads=2,head_dim=12,ffn=72,vocab=131";
        let difference = largest_difference(&random(&format!("{shape},{more}")), Dtype::F32);
        assert!(difference < 5e-5, "{more}: {difference}");
    }
}
