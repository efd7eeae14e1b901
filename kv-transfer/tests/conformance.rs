//! One suite, every transport: the same functions run on TCP, plain and in TLS, and on UCX over shared memory, and over forced TCP with
//! writes by messages, with UCX's own puts, and by reads of the sink; over pools of the host, and over remote ones that nobody but their device can address.

mod common;
mod suite;

use baton_kv_transfer::{TransportChoice, UcxLanes};

/// One test per function of the suite and transport.
macro_rules! on_every_transport {
    ($($module:ident :: $name:ident),* $(,)?) => {
        mod tcp {
            $(#[test] fn $name() { crate::suite::$module::$name(&crate::tcp_choice()); })*
        }
        mod tls {
            $(#[test] fn $name() { crate::common::in_tls(|| crate::suite::$module::$name(&crate::tcp_choice())); })*
        }
        mod ucx {
            $(#[test] fn $name() { crate::suite::$module::$name(&crate::ucx_choice()); })*
        }
        mod ucx_shared_memory {
            $(#[test] fn $name() { crate::suite::$module::$name(&crate::shared_memory_choice()); })*
        }
        mod tcp_remote {
            use crate::common::{in_memory, remote};
            $(#[test] fn $name() { in_memory(remote, || crate::suite::$module::$name(&crate::tcp_choice())); })*
        }
        mod tls_mixed {
            use crate::common::{in_memory, in_tls, mixed};
            $(#[test] fn $name() {
                in_tls(|| in_memory(mixed, || crate::suite::$module::$name(&crate::tcp_choice())));
            })*
        }
        mod ucx_remote {
            use crate::common::{in_memory, remote};
            $(#[test] fn $name() { in_memory(remote, || crate::suite::$module::$name(&crate::shared_memory_choice())); })*
        }
        mod ucx_mixed {
            use crate::common::{in_memory, mixed};
            $(#[test] fn $name() { in_memory(mixed, || crate::suite::$module::$name(&crate::ucx_choice())); })*
        }
        mod ucx_one_sided {
            $(#[test] fn $name() { crate::suite::$module::$name(&crate::common::ucx_one_sided()); })*
        }
        mod ucx_read {
            $(#[test] fn $name() { crate::suite::$module::$name(&crate::common::ucx_read()); })*
        }
    };
}

fn tcp_choice() -> TransportChoice {
    TransportChoice::Tcp { bind: [127, 0, 0, 1].into(), port: 0 }
}

fn shared_memory_choice() -> TransportChoice {
    TransportChoice::ucx(UcxLanes::SharedMemory, [127, 0, 0, 1].into())
}

fn ucx_choice() -> TransportChoice {
    TransportChoice::ucx(UcxLanes::LoopbackTcp, [127, 0, 0, 1].into())
}

on_every_transport![
    moving::random_layouts_and_block_sets_arrive_whole,
    moving::interleaved_transfers_stay_apart,
    moving::both_directions_at_once_are_two_connections_of_one_peer,
    moving::a_late_grant_finds_everything_computed,
    moving::nothing_is_written_before_its_fence,
    moving::neighbouring_blocks_go_in_one_write,
    moving::a_slow_sink_holds_back_only_its_own,
    moving::idle_connections_are_let_go,
    refusing::no_room_is_told,
    refusing::a_sink_that_does_not_adopt_is_told,
    refusing::without_incarnations_another_start_adopts_what_it_never_claimed,
    refusing::another_incarnation_is_refused,
    refusing::without_fingerprints_heads_are_taken_for_others,
    refusing::heads_are_never_taken_for_others,
    refusing::the_newest_common_protocol_is_enough,
    refusing::another_class_or_layout_is_refused_with_both_sides_named,
    refusing::impossible_blocks_are_refused_at_once,
    refusing::what_a_peer_calls_itself_leads_nobody_to_it,
    refusing::a_stranger_is_told_nothing,
    refusing::peers_that_connect_take_no_place_of_those_connected_to,
    failing::wrong_ticket_is_never_adopted,
    failing::corrupted_byte_is_found,
    failing::the_last_byte_of_every_length_is_compared,
    failing::a_hundred_handoffs_leave_nothing_behind,
    failing::checksums_sent_twice_are_not_adopted,
    failing::doubled_commit_adopts_once,
    failing::abort_in_every_phase_frees_both_sides,
    failing::cancel_at_the_sink_in_every_phase_frees_both_sides,
    failing::deadline_frees_both_sides,
    failing::device_failure_aborts,
    failing::garbage_closes_the_connection_and_nothing_else,
    failing::peer_gone_is_noticed,
    failing::a_panic_fails_everything_and_shows,
    failing::peer_comes_back,
    getting::everything_is_read_whole,
    getting::gets_and_puts_share_a_connection,
    getting::what_is_not_there_is_told,
    getting::without_the_pin_a_reader_adopts_other_bytes,
    getting::an_expired_pin_is_never_adopted,
    getting::an_owner_takes_its_blocks_back,
    getting::an_owner_that_restarts_confirms_nothing,
    getting::without_incarnations_a_restarted_owner_is_read_for_the_one_before,
    getting::a_restarted_owner_is_not_the_one_before,
    getting::a_damaged_byte_is_found,
    getting::a_get_that_is_given_up_frees_both_sides,
    parts::random_parts_arrive_and_nothing_else_changes,
    parts::an_older_source_is_asked_for_no_part,
    parts::cached_tokens_that_cannot_be_are_refused,
    parts::another_part_than_was_granted_is_never_adopted,
    parts::parts_that_were_not_agreed_on_are_refused,
    parts::a_damaged_byte_of_a_part_is_found,
    parts::random_parts_are_read_and_nothing_else_changes,
    parts::a_get_begins_with_a_block_of_both_sides_or_not_at_all,
    sharding::two_to_one,
    sharding::one_to_two,
    sharding::two_to_four,
    sharding::four_to_one,
    sharding::all_legs_leave_out_the_same,
    sharding::doubled_commit_of_one_shard_is_not_that_of_another,
    sharding::shards_without_common_heads_are_refused,
    states::states_arrive_whole,
    states::states_are_read_whole,
    states::an_early_state_is_never_sent,
    states::a_large_state_moves_in_pieces,
    states::an_abort_in_every_phase_frees_states,
    states::a_damaged_byte_of_a_state_is_never_adopted,
    states::a_damaged_byte_of_a_state_that_is_read_is_found,
    states::another_state_than_was_granted_is_never_adopted,
    states::peers_that_move_no_states_are_told,
    states::blocks_of_states_that_cannot_be_are_refused,
];
