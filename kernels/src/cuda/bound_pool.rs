//! The pool that a program's steps compute on: where each layer's KV is, and the block tables.

use super::arguments::model::KvPlanes;
use super::arguments::pool::RowsCopy;
use super::arguments::{Argument, In, Out};
use super::buffers::WORD;
use super::driver::{Buffer, Driver};
use super::pool::CudaPool;
use super::tables::Tables;
use crate::device::DeviceError;
use crate::kv::{GroupLayout, PoolLayout};
use crate::numerics::Half;
use baton_memory::PoolMemory;
use baton_types::{BlockId, KvPoolMap};
use std::sync::Arc;

pub(super) struct BoundPool {
    pub(super) memory: Arc<CudaPool>,
    pub(super) layout: PoolLayout,
    pub(super) tables: Tables,
    /// Entries of all tables, i32.
    pub(super) table: Buffer,
    /// Their changes in one step: index and value of each.
    pub(super) changes: Buffer,
    /// What describes the copy of a block in all layers of a group.
    pub(super) copies: Buffer,
    /// By layer.
    pub(super) kv: Vec<KvPlanes>,
}

impl BoundPool {
    /// Checks that the device's kernels reach the memory, and that it has the class's KV.
    pub(super) fn try_new(
        driver: &Arc<dyn Driver>,
        half: Half,
        memory: Arc<dyn PoolMemory>,
        map: &KvPoolMap,
        layout: PoolLayout,
        layers: u32,
    ) -> Result<Self, DeviceError> {
        let refuse = |message: String| Err(DeviceError::Shape { op: "bind", message });
        let Some(memory) = CudaPool::of(&memory, driver) else {
            return Err(DeviceError::PoolOutOfReach(memory.kind()));
        };
        if memory.bytes() < map.bytes() {
            return refuse(format!("the pool has {} bytes, its layout needs {}", memory.bytes(), map.bytes()));
        }
        if layout.groups().iter().any(GroupLayout::is_state) {
            return refuse("the pool has states, which GPU kernels do not compute yet".into());
        }
        let wanted = half.dtype();
        let tables = Tables::new(layout.limits());
        let table = Buffer::new(driver, tables.len() * WORD, "block tables")?;
        let changes = Buffer::new(driver, 2 * tables.len() * WORD, "changes of block tables")?;
        let of_block = layout.groups().iter().map(|group| group.layers() * group.planes().len());
        let copies = Buffer::new(driver, of_block.max().unwrap_or(0) * RowsCopy::BYTES, "copies of blocks")?;
        let mut kv = Vec::new();
        for layer in 0..layers {
            let (group, place) = (layout.of_layer(layer), layout.place(layer));
            let [k, v] = group.planes();
            let block_tokens = group.block_tokens();
            if !block_tokens.is_power_of_two() {
                return refuse(format!("blocks of {block_tokens} tokens: GPU kernels take powers of two"));
            }
            if let Some(dtype) = [k, v].map(|plane| group.dtype(plane)).into_iter().find(|dtype| *dtype != wanted) {
                return refuse(format!("this device attends to KV in {wanted}, the pool has {dtype}"));
            }
            let offset = |plane, block| group.offset(place.layer, plane, BlockId(block), 0);
            let stride = |plane| if group.blocks() > 1 { offset(plane, 1) - offset(plane, 0) } else { 0 };
            if stride(k) != stride(v) || group.token_stride(k) != group.token_stride(v) {
                return refuse("planes k and v with different strides".into());
            }
            let (first, table_stride) = tables.place(place.group);
            kv.push(KvPlanes {
                k: Out::at(memory.at().plus(offset(k, 0))),
                v: Out::at(memory.at().plus(offset(v, 0))),
                table: In::at(table.at().plus(first * WORD)),
                block_bytes: stride(k) as i64,
                token_bytes: group.token_stride(k) as i32,
                block_tokens: group.block_tokens() as i32,
                table_stride: table_stride as i32,
                reserved: 0,
            });
        }
        Ok(Self { memory, layout, tables, table, changes, copies, kv })
    }
}
