//! A step as kernels: a pure function of the program, the buffers and the step's shape.

use super::arguments::model::{Attend, Embed, Gemm, KvPlanes, RmsNorm, RopeStore, Select, SiluMul, epilogue};
use super::arguments::{In, Out};
use super::buffers::{Activations, StepLayout};
use super::driver::{Address, Command};
use super::launch::Launcher;
use super::ops::{Attention, Matrix, Norm, Op, Qkv};
use super::products::Pins;
use std::ops::Range;

/// Rows of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// All of them, padding included.
    pub(super) rows: usize,
    /// Those that attention divides by splits: the first ones.
    pub(super) decoded: usize,
    /// Most splits of a decoded row, and of a selected row.
    pub(super) splits: usize,
    pub(super) chosen_splits: usize,
    /// Tiles of the others.
    pub(super) tiles: usize,
    /// Selected rows.
    pub(super) chosen: usize,
}

/// What a plan says next.
pub(super) enum Next {
    Command(Command),
    /// The KV of this layer is stored.
    Stored(u32),
}

/// Everything a plan is made of.
#[derive(Debug)]
pub(super) struct Plan<'a> {
    pub(super) ops: &'a [Op],
    pub(super) launcher: Launcher,
    pub(super) pins: &'a Pins,
    pub(super) activations: &'a Activations,
    pub(super) layout: &'a StepLayout,
    /// Of the step's array on the device.
    pub(super) step: Address,
    /// The token that each slot sampled last.
    pub(super) last: Address,
    /// By layer.
    pub(super) kv: &'a [KvPlanes],
}

/// The activations that an operation reads and writes: those of all rows, or of the selected ones.
struct Stream {
    residual: Address,
    rows: usize,
}

impl Plan<'_> {
    fn part<T>(&self, part: &Range<usize>) -> In<T> {
        In::at(StepLayout::at(self.step, part))
    }

    /// Says the kernels of a step in order.
    pub(super) fn each(&self, shape: Shape, mut next: impl FnMut(Next)) {
        let a = self.activations;
        let mut stream = Stream { residual: a.residual.at(), rows: shape.rows };
        let mut qkv_cols = 0;
        let mut heads = (0, 0, 0);
        let mut selected = false;
        for op in self.ops {
            let mut enqueue = |command: Command| next(Next::Command(command));
            match op {
                Op::Embed(table) => enqueue(
                    self.launcher
                        .embed(Embed {
                            table: In::at(table.at),
                            ids: self.part(&self.layout.ids),
                            slots: self.part(&self.layout.slots),
                            sampled: In::at(self.last),
                            residual: Out::at(stream.residual),
                            rows: stream.rows as i32,
                            hidden: table.k as i32,
                            vocab: table.n as i32,
                            reserved: 0,
                        })
                        .into(),
                ),
                Op::Qkv(op) => {
                    qkv_cols = op.weight.n;
                    heads = (op.heads, op.kv_heads, op.head_dim);
                    enqueue(self.norm(op.norm, &stream, op.weight.k));
                    enqueue(self.product(self.gemm(
                        a.normed.at(),
                        op.weight,
                        op.bias,
                        a.qkv.at(),
                        epilogue::STORE_HALF,
                        &stream,
                    )));
                    enqueue(self.rope_store(op, &stream));
                    next(Next::Stored(op.layer));
                }
                Op::Attend(op) => self.attend(op, heads, qkv_cols, shape, selected, &mut enqueue),
                Op::Out(weight) => {
                    let (x, out) = (a.attended.at(), stream.residual);
                    enqueue(self.product(self.gemm(x, *weight, None, out, epilogue::ADD_RESIDUAL, &stream)));
                }
                Op::GateUp(norm, weight) => {
                    enqueue(self.norm(*norm, &stream, weight.k));
                    let both = self.gemm(a.normed.at(), *weight, None, a.gate_up.at(), epilogue::STORE_HALF, &stream);
                    // The library computes no activation of ours.
                    if self.pins.pinned(&both).is_some() {
                        enqueue(self.product(both));
                        let silu_mul = SiluMul {
                            gate_up: In::at(a.gate_up.at()),
                            inner: Out::at(a.inner.at()),
                            rows: stream.rows as i32,
                            ffn: (weight.n / 2) as i32,
                        };
                        enqueue(self.launcher.silu_mul(silu_mul).into());
                    } else {
                        let gated = Gemm { out: Out::at(a.inner.at()), epilogue: epilogue::STORE_GATED, ..both };
                        enqueue(self.launcher.gemm(gated).into());
                    }
                }
                Op::Down(weight) => {
                    let (x, out) = (a.inner.at(), stream.residual);
                    enqueue(self.product(self.gemm(x, *weight, None, out, epilogue::ADD_RESIDUAL, &stream)));
                }
                Op::Select => {
                    if shape.chosen == 0 {
                        return;
                    }
                    let (heads, _, head_dim) = heads;
                    enqueue(
                        self.launcher
                            .select(Select {
                                chosen: self.part(&self.layout.chosen),
                                residual: In::at(stream.residual),
                                residual_out: Out::at(a.selected.at()),
                                q: In::at(a.qkv.at()),
                                q_out: Out::at(a.query.at()),
                                rows: shape.chosen as i32,
                                hidden: a.hidden as i32,
                                query: (heads * head_dim) as i32,
                                q_stride: qkv_cols as i32,
                            })
                            .into(),
                    );
                    stream = Stream { residual: a.selected.at(), rows: shape.chosen };
                    selected = true;
                }
                Op::Head(norm, weight) => {
                    enqueue(self.norm(*norm, &stream, weight.k));
                    enqueue(self.product(self.gemm(
                        a.normed.at(),
                        *weight,
                        None,
                        a.logits.at(),
                        epilogue::STORE_F32,
                        &stream,
                    )));
                }
            }
        }
    }

    fn norm(&self, norm: Norm, stream: &Stream, cols: usize) -> Command {
        let norm = RmsNorm {
            x: In::at(stream.residual),
            gain: In::at(norm.gain),
            out: Out::at(self.activations.normed.at()),
            rows: stream.rows as i32,
            cols: cols as i32,
            eps: norm.eps,
            reserved: 0,
        };
        self.launcher.rms_norm(norm).into()
    }

    fn product(&self, gemm: Gemm) -> Command {
        self.pins.command(self.launcher, gemm)
    }

    fn gemm(
        &self,
        x: Address,
        weight: Matrix,
        bias: Option<Address>,
        out: Address,
        epilogue: i32,
        stream: &Stream,
    ) -> Gemm {
        Gemm {
            x: In::at(x),
            w: In::at(weight.at),
            bias: bias.map_or(In::null(), In::at),
            out: Out::at(out),
            m: stream.rows as i32,
            n: weight.n as i32,
            k: weight.k as i32,
            epilogue,
        }
    }

    fn rope_store(&self, op: &Qkv, stream: &Stream) -> Command {
        let [query, key] = op.head_norms.map_or([None, None], |norms| norms.map(Some));
        let gain = |norm: Option<Norm>| norm.map_or(In::null(), |norm| In::at(norm.gain));
        let eps = |norm: Option<Norm>| norm.map_or(0.0, |norm| norm.eps);
        let store = RopeStore {
            kv: self.kv[op.layer as usize],
            qkv: Out::at(self.activations.qkv.at()),
            q_gain: gain(query),
            k_gain: gain(key),
            cos: In::at(op.cos),
            sin: In::at(op.sin),
            slots: self.part(&self.layout.slots),
            positions: self.part(&self.layout.positions),
            rows: stream.rows as i32,
            heads: op.heads as i32,
            kv_heads: op.kv_heads as i32,
            head_dim: op.head_dim as i32,
            rope_dim: op.rope_dim as i32,
            q_eps: eps(query),
            k_eps: eps(key),
            reserved: 0,
        };
        self.launcher.rope_store(store).into()
    }

    /// All rows: the first ones by splits, the others by tiles. Selected rows: each by splits.
    fn attend(
        &self,
        op: &Attention,
        (heads, kv_heads, head_dim): (usize, usize, usize),
        qkv_cols: usize,
        shape: Shape,
        selected: bool,
        enqueue: &mut impl FnMut(Command),
    ) {
        let a = self.activations;
        let all = Attend {
            kv: self.kv[op.layer as usize],
            q: In::at(a.qkv.at()),
            out: Out::at(a.attended.at()),
            slots: self.part(&self.layout.slots),
            positions: self.part(&self.layout.positions),
            tiles: self.part(&self.layout.tiles),
            partials: Out::at(a.partials.at()),
            rows: shape.decoded as i32,
            heads: heads as i32,
            kv_heads: kv_heads as i32,
            head_dim: head_dim as i32,
            q_stride: qkv_cols as i32,
            window: op.window as i32,
            splits: shape.splits as i32,
            factor: op.factor,
        };
        if selected {
            let chosen = Attend {
                q: In::at(a.query.at()),
                slots: self.part(&self.layout.chosen_slots),
                positions: self.part(&self.layout.chosen_positions),
                rows: shape.chosen as i32,
                q_stride: (heads * head_dim) as i32,
                splits: shape.chosen_splits as i32,
                ..all
            };
            return self.launcher.attend_decode(chosen).map(Into::into).into_iter().for_each(enqueue);
        }
        if shape.decoded > 0 {
            self.launcher.attend_decode(all).map(Into::into).into_iter().for_each(&mut *enqueue);
        }
        if shape.tiles > 0 {
            enqueue(self.launcher.attend_prefill(all, shape.tiles).into());
        }
    }
}
