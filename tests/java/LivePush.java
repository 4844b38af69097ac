import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;

/**
 * Push consumers of the official client that stay up, whatever happens to the broker.
 * Usage: LivePush NAMESRV TOPIC GROUP MEMBERS PERSIST_MS. Prints `READY`, then
 * `GOT number queueId queueOffset storeTimestamp` for each message consumed, until its input ends.
 */
public final class LivePush {
    private LivePush() {
    }

    public static void main(String[] args) throws Exception {
        PrintStream out = new PrintStream(new java.io.FileOutputStream(java.io.FileDescriptor.out), true);
        List<DefaultMQPushConsumer> members = new ArrayList<>();
        for (int m = 0; m < Integer.parseInt(args[3]); m++) {
            DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(args[2]);
            consumer.setNamesrvAddr(args[0]);
            consumer.setInstanceName("member" + m);
            // A machine that is busy with other tests answers late.
            consumer.setMqClientApiTimeout(30_000);
            consumer.setPersistConsumerOffsetInterval(Integer.parseInt(args[4]));
            consumer.setHeartbeatBrokerInterval(2000);
            consumer.setPollNameServerInterval(2000);
            consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
            consumer.setConsumeMessageBatchMaxSize(32);
            consumer.subscribe(args[1], "*");
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
                StringBuilder lines = new StringBuilder();
                for (MessageExt message : messages) {
                    lines.append("GOT ").append(ByteBuffer.wrap(message.getBody()).getLong()).append(' ')
                        .append(message.getQueueId()).append(' ').append(message.getQueueOffset()).append(' ')
                        .append(message.getStoreTimestamp()).append('\n');
                }
                synchronized (out) {
                    out.print(lines);
                    out.flush();
                }
                return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
            });
            consumer.start();
            members.add(consumer);
        }
        out.println("READY");
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in));
        while (in.readLine() != null) {
            Thread.sleep(1);
        }
        Runtime.getRuntime().halt(0);
    }
}
