//! Owns the headers of requests that admin tools send to a broker.
//!
//! Invariant: field names are RocketMQ's.

request! {
    /// Code 17, UPDATE_AND_CREATE_TOPIC, and 513, UPDATE_AND_CREATE_STATIC_TOPIC.
    CreateTopic {
        topic: need_str "topic", default_topic: str "defaultTopic",
        read_queue_nums: need_i32 "readQueueNums", write_queue_nums: need_i32 "writeQueueNums",
        perm: need_i32 "perm", topic_filter_type: str "topicFilterType",
        topic_sys_flag: i32 "topicSysFlag", order: bool "order", attributes: str "attributes",
        force: bool "force",
    }

    /// Code 215, DELETE_TOPIC_IN_BROKER, and other requests that carry a topic only: 202, 300, 351.
    DeleteTopic { topic: need_str "topic" }

    /// Codes 202, 300 and 351: a topic only.
    TopicName { topic: need_str "topic" }

    /// Code 21, GET_ALL_TOPIC_CONFIG; callers of older versions send none of these.
    AllTopicConfig {
        topic_seq: i32 "topicSeq", data_version: str "dataVersion",
        max_topic_num: i32 "maxTopicNum",
    }

    /// Code 201, GET_ALL_SUBSCRIPTIONGROUP_CONFIG; callers of older versions send none of these.
    AllGroupConfig {
        group_seq: i32 "groupSeq", data_version: str "dataVersion",
        max_group_num: i32 "maxGroupNum",
    }

    /// Code 207, DELETE_SUBSCRIPTIONGROUP.
    DeleteGroup { group_name: need_str "groupName", clean_offset: bool "cleanOffset" }

    /// Codes 352 and 343: a group only.
    GroupName { group: need_str "group" }

    /// Code 353, UPDATE_AND_GET_GROUP_FORBIDDEN.
    GroupForbidden { group: need_str "group", topic: need_str "topic", readable: bool "readable" }

    /// Code 208, GET_CONSUME_STATS.
    ConsumeStatsOf {
        consumer_group: need_str "consumerGroup", topic: str "topic", topic_list: str "topicList",
    }

    /// Code 317, GET_BROKER_CONSUME_STATS.
    BrokerConsumeStats { is_order: need_bool "isOrder" }

    /// Code 204, GET_PRODUCER_CONNECTION_LIST.
    ProducerList { producer_group: need_str "producerGroup" }

    /// Codes 222, INVOKE_BROKER_TO_RESET_OFFSET, and 220, RESET_CONSUMER_CLIENT_OFFSET.
    ResetOffset {
        topic: need_str "topic", group: need_str "group", queue_id: i32 "queueId",
        offset: i64 "offset", timestamp: need_i64 "timestamp", is_force: bool "isForce",
    }

    /// Code 223, INVOKE_BROKER_TO_GET_CONSUMER_STATUS.
    ConsumerStatus {
        topic: need_str "topic", group: need_str "group", client_addr: str "clientAddr",
    }

    /// Codes 303, QUERY_CONSUME_TIME_SPAN, and 345, QUERY_SUBSCRIPTION_BY_CONSUMER.
    GroupAndTopic { group: need_str "group", topic: str "topic" }

    /// Code 307, GET_CONSUMER_RUNNING_INFO.
    ConsumerRunning {
        consumer_group: need_str "consumerGroup", client_id: need_str "clientId",
        jstack_enable: bool "jstackEnable",
    }

    /// Code 309, CONSUME_MESSAGE_DIRECTLY.
    ConsumeDirectly {
        consumer_group: need_str "consumerGroup", client_id: str "clientId", msg_id: str "msgId",
        broker_name: str "brokerName", topic: str "topic", topic_sys_flag: i32 "topicSysFlag",
        group_sys_flag: i32 "groupSysFlag",
    }

    /// Code 308, QUERY_CORRECTION_OFFSET.
    CorrectionOffset {
        filter_groups: str "filterGroups", compare_group: need_str "compareGroup",
        topic: need_str "topic",
    }

    /// Code 314, CLONE_GROUP_OFFSET.
    CloneGroupOffset {
        src_group: need_str "srcGroup", dest_group: need_str "destGroup",
        topic: need_str "topic", offline: bool "offline",
    }

    /// Code 315, VIEW_BROKER_STATS_DATA.
    ViewStats { stats_name: need_str "statsName", stats_key: need_str "statsKey" }

    /// Code 321, QUERY_CONSUME_QUEUE.
    QueryConsumeQueue {
        topic: need_str "topic", queue_id: need_i32 "queueId", index: need_i64 "index",
        count: need_i32 "count", consumer_group: str "consumerGroup",
    }

    /// Code 323, RESUME_CHECK_HALF_MESSAGE.
    ResumeHalfMessage { topic: str "topic", msg_id: need_str "msgId" }

    /// Codes 3003 and 3004 (`username`) and 3005 (`filter`): users.
    UserQuery { username: str "username", filter: str "filter" }

    /// Codes 3006 to 3010: access lists.
    AclQuery {
        subject: str "subject", policy_type: str "policyType", resource: str "resource",
        subject_filter: str "subjectFilter", resource_filter: str "resourceFilter",
    }
}
