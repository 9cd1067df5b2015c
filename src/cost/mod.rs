//! The cost model of a stage.
//!
//! `device_kinds` has the times of layers on several kinds of devices. `layer_sums` and `grad_reduce` give seconds, `memory`
//! gives bytes, `network` gives the times of transfers and all-reduces on a cluster, `tied_weights` gives what weights add
//! that several stages share, and `zero` gives the messages of replicas that shard gradients and weights.

pub mod device_kinds;
pub mod grad_reduce;
pub mod layer_sums;
pub mod memory;
pub mod nesting;
pub mod network;
pub mod tied_weights;
pub mod zero;

pub use device_kinds::{DeviceKinds, Pace, Passes, TypeTimes};
pub use grad_reduce::{SyncTail, exposed_s, grad_reduce_s, sync_without_s};
pub use layer_sums::{Interpolation, LayerSums, Totals};
pub use memory::{Memory, MemoryModel, memory};
pub use tied_weights::shared;
pub use zero::ShardMessages;
