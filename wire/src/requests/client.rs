//! Owns the headers of requests that producers and consumers send, and of those sent to them.
//!
//! Invariant: field names are RocketMQ's.

request! {
    /// Code 36, CONSUMER_SEND_MSG_BACK.
    SendBack {
        offset: need_i64 "offset", group: need_str "group", delay_level: need_i32 "delayLevel",
        origin_msg_id: str "originMsgId", origin_topic: str "originTopic",
        unit_mode: bool "unitMode", max_reconsume_times: i32 "maxReconsumeTimes",
    }

    /// Code 37, END_TRANSACTION.
    EndTransaction {
        topic: str "topic", producer_group: need_str "producerGroup",
        tran_state_table_offset: need_i64 "tranStateTableOffset",
        commit_log_offset: need_i64 "commitLogOffset",
        commit_or_rollback: need_i32 "commitOrRollback",
        from_transaction_check: bool "fromTransactionCheck",
        msg_id: str "msgId", transaction_id: str "transactionId",
    }

    /// Code 370, RECALL_MESSAGE.
    RecallMessage {
        producer_group: str "producerGroup", topic: need_str "topic",
        recall_handle: need_str "recallHandle",
    }

    /// Code 14, QUERY_CONSUMER_OFFSET.
    QueryOffset {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", set_zero_if_not_found: bool "setZeroIfNotFound",
    }

    /// Code 15, UPDATE_CONSUMER_OFFSET.
    UpdateOffset {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", commit_offset: need_i64 "commitOffset",
    }

    /// Code 30, GET_MAX_OFFSET.
    MaxOffset {
        topic: need_str "topic", queue_id: need_i32 "queueId", committed: bool "committed",
    }

    /// Code 31, GET_MIN_OFFSET.
    MinOffset { topic: need_str "topic", queue_id: need_i32 "queueId" }

    /// Code 29, SEARCH_OFFSET_BY_TIMESTAMP.
    SearchOffset {
        topic: need_str "topic", queue_id: need_i32 "queueId", timestamp: need_i64 "timestamp",
        boundary_type: str "boundaryType",
    }

    /// Code 32, GET_EARLIEST_MSG_STORETIME.
    EarliestStoreTime { topic: need_str "topic", queue_id: need_i32 "queueId" }

    /// Code 33, VIEW_MESSAGE_BY_ID.
    ViewMessage { topic: str "topic", offset: need_i64 "offset" }

    /// Code 12, QUERY_MESSAGE.
    QueryMessage {
        topic: need_str "topic", key: need_str "key", max_num: need_i32 "maxNum",
        begin_timestamp: need_i64 "beginTimestamp", end_timestamp: need_i64 "endTimestamp",
        index_type: str "indexType", unique_key_query: bool "_UNIQUE_KEY_QUERY",
    }

    /// Code 35, UNREGISTER_CLIENT.
    UnregisterClient {
        client_id: need_str "clientID", producer_group: str "producerGroup",
        consumer_group: str "consumerGroup",
    }

    /// Code 38, GET_CONSUMER_LIST_BY_GROUP, and 203, GET_CONSUMER_CONNECTION_LIST.
    ConsumerList { consumer_group: need_str "consumerGroup" }

    /// Code 200050, POP_MESSAGE.
    PopMessage {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", max_msg_nums: need_i32 "maxMsgNums",
        invisible_time: need_i64 "invisibleTime", poll_time: need_i64 "pollTime",
        born_time: need_i64 "bornTime", init_mode: need_i32 "initMode", exp_type: str "expType",
        exp: str "exp", order: bool "order", attempt_id: str "attemptId",
    }

    /// Code 200051, ACK_MESSAGE.
    AckMessage {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", extra_info: need_str "extraInfo",
        offset: need_i64 "offset",
    }

    /// Code 200053, CHANGE_MESSAGE_INVISIBLETIME.
    ChangeInvisibleTime {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", extra_info: need_str "extraInfo",
        offset: need_i64 "offset", invisible_time: need_i64 "invisibleTime",
    }

    /// Code 200054, NOTIFICATION.
    Notification {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", poll_time: need_i64 "pollTime",
        born_time: need_i64 "bornTime", order: bool "order", attempt_id: str "attemptId",
    }

    /// Code 200055, POLLING_INFO.
    PollingInfo {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId",
    }

    /// Code 200052, PEEK_MESSAGE.
    PeekMessage {
        consumer_group: need_str "consumerGroup", topic: need_str "topic",
        queue_id: need_i32 "queueId", max_msg_nums: need_i32 "maxMsgNums",
    }

    /// Code 39, CHECK_TRANSACTION_STATE, sent to producers.
    CheckTransactionState {
        topic: str "topic", tran_state_table_offset: need_i64 "tranStateTableOffset",
        commit_log_offset: need_i64 "commitLogOffset", msg_id: str "msgId",
        transaction_id: str "transactionId", offset_msg_id: str "offsetMsgId",
    }
}
