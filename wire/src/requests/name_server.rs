//! Owns the headers of requests to a name server.
//!
//! Invariant: field names are RocketMQ's.

request! {
    /// Code 105, GET_ROUTEINFO_BY_TOPIC.
    RouteOf {
        topic: need_str "topic", accept_standard_json_only: bool "acceptStandardJsonOnly",
        zone_name: str "__ZONE_NAME", zone_mode: bool "__ZONE_MODE",
    }

    /// Code 103, REGISTER_BROKER.
    RegisterBroker {
        broker_name: need_str "brokerName", broker_addr: need_str "brokerAddr",
        cluster_name: need_str "clusterName", ha_server_addr: str "haServerAddr",
        broker_id: need_i64 "brokerId", heartbeat_timeout_millis: i64 "heartbeatTimeoutMillis",
        enable_acting_master: bool "enableActingMaster", compressed: bool "compressed",
        body_crc32: i64 "bodyCrc32", zone_name: str "__ZONE_NAME",
    }

    /// Code 104, UNREGISTER_BROKER, and 322, QUERY_DATA_VERSION.
    BrokerIdentity {
        broker_name: need_str "brokerName", broker_addr: need_str "brokerAddr",
        cluster_name: need_str "clusterName", broker_id: need_i64 "brokerId",
    }

    /// Code 904, BROKER_HEARTBEAT.
    BrokerHeartbeat {
        cluster_name: need_str "clusterName", broker_addr: need_str "brokerAddr",
        broker_name: need_str "brokerName", broker_id: i64 "brokerId", epoch: i32 "epoch",
        max_offset: i64 "maxOffset", confirm_offset: i64 "confirmOffset",
        heartbeat_timeout_millis: i64 "heartbeatTimeoutMills",
        election_priority: i32 "electionPriority",
    }

    /// Code 217, REGISTER_TOPIC_IN_NAMESRV.
    RegisterTopic { topic: need_str "topic" }

    /// Code 901, GET_BROKER_MEMBER_GROUP.
    MemberGroup { cluster_name: need_str "clusterName", broker_name: need_str "brokerName" }

    /// Codes 205, WIPE_WRITE_PERM_OF_BROKER, and 327, ADD_WRITE_PERM_OF_BROKER.
    WritePerm { broker_name: need_str "brokerName" }

    /// Code 216, DELETE_TOPIC_IN_NAMESRV.
    DeleteTopicInNameServer { topic: need_str "topic", cluster_name: str "clusterName" }

    /// Code 219, GET_KVLIST_BY_NAMESPACE.
    KvNamespace { namespace: need_str "namespace" }

    /// Codes 100, 101 and 102: the key-value table; `value` comes with 100 only.
    KvEntry { namespace: need_str "namespace", key: need_str "key", value: str "value" }

    /// Code 224, GET_TOPICS_BY_CLUSTER.
    TopicsByCluster { cluster: need_str "cluster" }
}
